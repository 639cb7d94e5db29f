"""Answers of other models in the agents' tokens, one by one and in sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.settings import Sampling, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.environment.joint_format import TaggedSections
from comlrl_lightning.preferences.api import Answer
from comlrl_lightning.preferences.comparators import (
    FixedModel,
)
from comlrl_lightning.preferences.external import SectionCounts, adopted
from comlrl_lightning.types import Completion, Prompt
from tests.agents.helpers import flat, shared_team
from tests.preferences.asking import EOS, SAMPLING, asked, ids_of, said
from tests.tiny_lm import tiny_llama, tiny_tokenizer


@dataclass(frozen=True)
class Halves:
    """A joint format for models that write no tags: a slash parts the answers."""

    def build_prompt(self, prompts: Sequence[Prompt]) -> Prompt:
        return "/".join(map(str, prompts))

    def split_completion(self, text: str, num_agents: int) -> list[str] | None:
        parts = text.split("/")
        return [*parts, *[""] * num_agents][:num_agents] if len(parts) > 1 else None


class ScriptedModel(FixedModel):
    """A fixed model whose own texts are replaced."""

    script: tuple[tuple[str, bool], ...] = ()

    def sampler(self, team: AgentTeam) -> Any:
        sampler = super().sampler(team)
        (own,) = self.modules()
        generate = cast(AgentTeam, own).generate

        def scripted(given: Sequence[GenerationRequest], sampling: Sampling, progress: Any = None) -> Any:
            self.given, self.own_sampling = list(given), sampling
            generate(given, Sampling(max_new_tokens=1))
            texts = iter(self.script)
            return [
                tuple(
                    Completion(request.agent, request.prompt, (1,), (2,), (0.0,), text, truncated)
                    for text, truncated in [next(texts) for _ in request.keys]
                )
                for request in given
            ]

        cast(Any, own).generate = scripted
        return sampler


def test_one_fixed_model_writes_all_answers_in_sections(folder: str) -> None:
    team = shared_team()
    comparator = ScriptedModel(SharedBase(folder, 1), generation="centralized")
    comparator.script = (
        ("<agent_0>x</agent_0><agent_1>yz</agent_1>", False),
        ("<agent_1>only</agent_1>", False),
        ("no sections here", False),
        ("<agent_0>done</agent_0><agent_1>cu", True),
    )
    spoken = said(comparator, team)
    # By request: agents 0 and 1 of node 0 with samples 0 and 1, then those of node 1.
    assert [completion.text for completion in spoken] == ["x", "", "yz", "only", "", "done", "", "cu"]
    assert [completion.agent for completion in spoken] == [0, 0, 1, 1, 0, 0, 1, 1]
    end = (EOS,)
    tokens = [ids_of(text) + end for text in ("x", "", "yz", "only", "", "done", "")] + [ids_of("cu")]
    assert [completion.token_ids for completion in spoken] == tokens
    # Only the section that the limit cut is cut; the one before it was closed.
    assert [completion.truncated for completion in spoken] == [False] * 7 + [True]
    assert [completion.prompt for completion in spoken] == ["ab"] * 4 + ["c"] * 4
    assert comparator.pop_counts() == SectionCounts(num_joint=4, num_unparsed=1)
    assert comparator.pop_counts() == SectionCounts(0, 0)
    # One request per node, for all agents, with room for both answers and their tags.
    assert [request.prompt for request in comparator.given] == [
        TaggedSections().build_prompt([p] * 2) for p in ("ab", "c")
    ]
    assert comparator.own_sampling.max_new_tokens == 2 * (8 + 16)


def test_any_joint_format_will_do(folder: str) -> None:
    comparator = ScriptedModel(SharedBase(folder, 1), generation=Halves())
    comparator.script = (("a/b", False), ("c", False), ("/", False), ("d/e/f", False))
    spoken = said(comparator, shared_team())
    assert [completion.text for completion in spoken] == ["a", "", "b", "", "", "d", "", "e"]
    assert comparator.pop_counts() == SectionCounts(4, 1)
    assert comparator.given[0].prompt == "ab/ab"


def test_a_centralized_team_is_asked_once_and_splits_by_itself(folder: str) -> None:
    # One trained model: the collector merges prompts and splits completions, so that the text comes as it is.
    team = shared_team(num_agents=1)
    comparator = ScriptedModel(SharedBase(folder, 1), generation="centralized")
    comparator.script = (("<agent_0>x</agent_0>", False),) * 4
    sampler = comparator.sampler(team)
    assert sampler.num_agents == 1
    spoken = flat(sampler.generate(asked(agents=[0]), Sampling(max_new_tokens=30)))
    assert [request.prompt for request in comparator.given] == ["ab", "c"]
    assert comparator.pop_counts() == SectionCounts(0, 0)
    assert len(spoken) == 4


def taken(answer: Answer, team: AgentTeam | None = None, **sampling: Any) -> Completion:
    (request,) = asked(prompts=["ab"], agents=[0])
    given = Sampling(**{"max_new_tokens": 8, **sampling})
    return adopted(team or shared_team(), request, (256, 1), answer, given)


@pytest.mark.parametrize(
    ("answer", "sampling", "tokens", "text", "truncated"),
    [
        (Answer("hi"), {}, (*ids_of("hi"), EOS), "hi", False),
        (Answer("hi", ended=False), {}, ids_of("hi"), "hi", True),
        (Answer(""), {}, (EOS,), "", False),
        # Nothing but hidden reasoning: an empty answer like any other.
        (Answer("", ended=False), {}, (EOS,), "", False),
        # 9 tokens and the end are more than 8, and 8 tokens with the end are too.
        (Answer("ninechars"), {}, ids_of("ninechar"), "ninechar", True),
        (Answer("eightcha"), {}, ids_of("eightcha"), "eightcha", True),
        (Answer("seven77"), {}, (*ids_of("seven77"), EOS), "seven77", False),
        # As the agents sample: the tokens end with the first stop string, the text before it, without an end token.
        (Answer("a;b.c"), {"stop": (".", ";")}, ids_of("a;"), "a", False),
        (Answer("a;b", ended=False), {"stop": (";",)}, ids_of("a;"), "a", False),
        # What looks like a special token is text.
        (Answer("<eos>"), {}, (*(ids_of("<") + ids_of("eos") + ids_of(">")), EOS), "<eos>", False),
        # Tokens of the agent itself are kept, here as two bytes that are no letters.
        (Answer("??", token_ids=(200, 201)), {}, (200, 201, EOS), "??", False),
        (Answer("?", ended=False, token_ids=(200,)), {}, (200,), "?", True),
        (Answer("a;", token_ids=(5, 6)), {"stop": (";",)}, (5, 6), "a", False),
        (Answer("", token_ids=()), {}, (EOS,), "", False),
    ],
)
def test_how_an_answer_becomes_the_agents(
    answer: Answer, sampling: dict[str, Any], tokens: tuple[int, ...], text: str, truncated: bool
) -> None:
    completion = taken(answer, **sampling)
    assert completion == Completion(0, "ab", (256, 1), tokens, (), text, truncated)


def test_an_empty_answer_needs_an_end_token() -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = None
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    team = shared_team(model, tokenizer=tokenizer)
    assert taken(Answer("hi"), team).token_ids == ids_of("hi")
    with pytest.raises(ValueError, match="agent_0 an empty answer"):
        taken(Answer(""), team)


def test_long_prompts_are_found_before_anyone_is_asked(folder: str) -> None:
    team = shared_team(max_prompt_tokens=2, long_prompts="error")
    comparator = ScriptedModel(SharedBase(folder, 2))
    sampler = comparator.sampler(team)
    with pytest.raises(ValueError, match="A prompt of agent_0 has 3 tokens"):
        sampler.generate(asked(), SAMPLING)
    assert not vars(comparator).get("given")
