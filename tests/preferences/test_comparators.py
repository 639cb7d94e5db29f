"""Comparators: who answers, in whose tokens, and what a run keeps of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from jsonargparse import ArgumentParser

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import Sampling, Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.environment.joint_format import TaggedSections
from comlrl_lightning.preferences.comparators import (
    APIComparator,
    Comparator,
    CurrentPolicy,
    FixedModel,
    FrozenCopy,
    HistoryPolicy,
)
from comlrl_lightning.preferences.external import SectionCounts
from comlrl_lightning.types import Completion
from comlrl_lightning.utilities.plain import from_plain, to_plain
from tests.agents.helpers import flat, shared_team, stir
from tests.preferences.asking import EOS, KEY, SAMPLING, api, asked, ids_of, said
from tests.tiny_lm import tiny_qwen2, tiny_tokenizer


def test_the_current_policy_is_the_team() -> None:
    team = shared_team()
    comparator = CurrentPolicy()
    comparator.begin_round(0, team)
    assert comparator.sampler(team) is team
    assert comparator.state_dict() == {}
    assert comparator.modules() == []
    assert comparator.pop_counts() == SectionCounts(0, 0)


def voices(team: AgentTeam, rounds: int) -> list[list[Completion]]:
    """What the team says at the start of each of several rounds; learning is some noise."""
    spoken = []
    for number in range(rounds):
        spoken.append(flat(team.generate(asked(), SAMPLING)))
        stir(team, 0.3, seed=number)
    return spoken


@pytest.mark.parametrize(("rounds_back", "expected"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
def test_a_history_speaks_as_the_policy_at_the_start_of_the_round_so_far_back(
    rounds_back: int, expected: list[int]
) -> None:
    # In round r it is the policy at the start of round max(0, r - rounds_back): back 1 in round 3 is round 2's.
    spoken = voices(shared_team(), 4)
    assert len({str(completions) for completions in spoken}) == 4
    team = (torch.manual_seed(0), shared_team())[1]
    comparator = HistoryPolicy(rounds_back)
    for number in range(4):
        comparator.begin_round(number, team)
        assert said(comparator, team) == spoken[expected[number]]
        stir(team, 0.3, seed=number)
        # Learning within the round changes nothing about it.
        assert said(comparator, team) == spoken[expected[number]]
        assert len(comparator.state_dict()["weights"]) == min(number, rounds_back) + 1


def test_a_frozen_copy_is_a_history_of_no_rounds() -> None:
    assert FrozenCopy().rounds_back == 0
    assert isinstance(FrozenCopy(), HistoryPolicy)
    with pytest.raises(TypeError):
        cast(Any, FrozenCopy)(rounds_back=1)


def test_a_history_goes_on_from_its_state() -> None:
    spoken = voices(shared_team(), 3)
    team = (torch.manual_seed(0), shared_team())[1]
    first = HistoryPolicy(1)
    for number in range(2):
        first.begin_round(number, team)
        stir(team, 0.3, seed=number)
    stream = io.BytesIO()
    torch.save(first.state_dict(), stream)
    stream.seek(0)
    second = HistoryPolicy(1)
    second.load_state_dict(torch.load(stream, weights_only=True))
    # Round 1 is begun again in its middle, after learning: its start stays what it was.
    second.begin_round(1, team)
    assert said(second, team) == spoken[0]
    second.begin_round(2, team)
    assert said(second, team) == spoken[1]


def test_a_history_of_a_former_run_is_forgotten() -> None:
    team = shared_team()
    comparator = HistoryPolicy(2)
    for number in range(3):
        comparator.begin_round(number, team)
    stir(team, 0.3)
    present = flat(team.generate(asked(), SAMPLING))
    comparator.begin_run()
    comparator.begin_round(0, team)
    assert said(comparator, team) == present


def test_rounds_back_is_checked() -> None:
    with pytest.raises(ValueError, match=r"HistoryPolicy\(rounds_back=-1\)"):
        HistoryPolicy(-1)


def test_a_fixed_model_answers_in_the_agents_tokens(folder: str) -> None:
    team = shared_team()
    comparator = FixedModel(SharedBase(folder, 2))
    comparator.begin_round(0, team)
    spoken = said(comparator, team)
    # The same tokenizer: the tokens are those that the model sampled, which a team of it samples too.
    alone = build_team(SharedBase(folder, 2))
    expected = flat(alone.generate(asked(), SAMPLING))
    assert [completion.token_ids for completion in spoken] == [completion.token_ids for completion in expected]
    assert [completion.text for completion in spoken] == [completion.text for completion in expected]
    assert [completion.prompt_ids for completion in spoken] == [completion.prompt_ids for completion in expected]
    assert [completion.truncated for completion in spoken] == [completion.truncated for completion in expected]
    assert [completion.agent for completion in spoken] == [0, 0, 1, 1] * 2
    assert all(completion.log_probs == () for completion in spoken)
    assert comparator.pop_counts() == SectionCounts(0, 0)


def test_a_fixed_model_is_loaded_once_and_frozen(folder: str) -> None:
    comparator = FixedModel(SharedBase(folder, 2))
    assert comparator.modules() == []
    before = torch.get_rng_state()
    comparator.build()
    assert torch.equal(torch.get_rng_state(), before)
    (module,) = comparator.modules()
    comparator.build()
    comparator.sampler(shared_team())
    assert comparator.modules() == [module]
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert comparator.state_dict() == {}


def test_a_fixed_model_with_other_tokens_is_encoded_again() -> None:
    def other() -> SharedBase:
        # Bytes are numbered from the other end, so that equal ids would mean other texts.
        return SharedBase(tiny_qwen2(seed=5), 2, tokenizer=tiny_tokenizer(reverse=True))

    spoken = said(FixedModel(other()), shared_team())
    alone = flat(build_team(other()).generate(asked(), SAMPLING))
    for completion, original in zip(spoken, alone, strict=True):
        ids = ids_of(original.text) + (() if original.truncated else (EOS,))
        assert completion.token_ids == ids[: SAMPLING.max_new_tokens]
        assert completion.token_ids != original.token_ids
        assert completion.prompt_ids == (256, *ids_of(str(completion.prompt)))


def test_a_fixed_model_may_sample_otherwise(folder: str) -> None:
    team = shared_team()
    greedy = Sampling(max_new_tokens=5, temperature=0)
    spoken = said(FixedModel(SharedBase(folder, 2), sampling=greedy), team)
    # Both samples of a prompt are the same.
    assert spoken[0].token_ids == spoken[1].token_ids
    expected = flat(build_team(SharedBase(folder, 2)).generate(asked(), greedy))
    assert [completion.token_ids for completion in spoken] == [completion.token_ids for completion in expected]


def test_fixed_models_must_fit_the_agents(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FixedModel\(agents=\.\.\.\) describes 3 agents, but 2 are trained"):
        FixedModel(SharedBase(folder, 3)).sampler(shared_team())
    (tmp_path / "saved" / "agent_0").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"SharedBase\(adapters='.*'\) holds no folder 'agent_1'"):
        FixedModel(SharedBase(folder, 2, adapters=str(tmp_path / "saved")))
    with pytest.raises(ValueError, match="one model write all answers, but agents= describes 2"):
        FixedModel(SharedBase(folder, 2), generation="centralized")
    with pytest.raises(ValueError, match="describes no models"):
        FixedModel(cast(Any, folder))
    with pytest.raises(ValueError, match=r"FixedModel\(generation='both'\) is unknown"):
        FixedModel(SharedBase(folder, 2), generation=cast(Any, "both"))
    with pytest.raises(ValueError, match="is unknown"):
        FixedModel(SharedBase(folder, 2), generation=cast(Any, TaggedSections))
    with pytest.raises(ValueError, match="is no Sampling"):
        FixedModel(SharedBase(folder, 2), sampling=cast(Any, 3))


COMPARATORS: list[Callable[[], Comparator]] = [
    CurrentPolicy,
    FrozenCopy,
    lambda: HistoryPolicy(3),
    lambda: FixedModel(SharedBase("some/model", 1), generation=TaggedSections("role_{i}")),
    lambda: FixedModel(Separate(["a", "b"]), sampling=Sampling(temperature=0.3)),
    lambda: api("http://127.0.0.1:9", request_fields={"top_p": 0.9}),
]


@pytest.mark.parametrize("build", COMPARATORS)
def test_settings_reach_hyperparameters_and_come_back(build: Callable[[], Comparator]) -> None:
    comparator = build()
    plain = to_plain(comparator)
    assert KEY not in json.dumps(plain)
    again = from_plain("comparator", plain)
    assert type(again) is type(comparator)
    assert to_plain(again) == plain


@pytest.mark.parametrize("build", COMPARATORS)
def test_no_state_or_text_of_a_comparator_holds_a_key(build: Callable[[], Comparator]) -> None:
    comparator = build()
    assert KEY not in repr(comparator)
    assert KEY not in repr(comparator.state_dict())
    assert KEY not in repr(vars(comparator))


def test_comparators_are_nameable_from_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--comparator", type=Comparator | None)
    module = "comlrl_lightning.preferences.comparators."
    for text, expected in [
        (f"{{class_path: {module}HistoryPolicy, init_args: {{rounds_back: 2}}}}", HistoryPolicy(2)),
        (f"{module}FrozenCopy", FrozenCopy()),
        (
            f"{{class_path: {module}APIComparator, "
            "init_args: {provider: openai, model: m, generation: centralized}}",
            APIComparator("openai", "m", generation="centralized"),
        ),
        (
            f"{{class_path: {module}FixedModel, init_args: {{agents: {{class_path: "
            "comlrl_lightning.agents.settings.SharedBase, init_args: {model: a/b, num_agents: 2}}}}",
            FixedModel(SharedBase("a/b", 2)),
        ),
        (
            f"{{class_path: {module}FixedModel, init_args: {{agents: {{class_path: "
            "comlrl_lightning.agents.settings.SharedBase, init_args: {model: a/b, num_agents: 1}}, generation: "
            "{class_path: comlrl_lightning.environment.joint_format.TaggedSections, init_args: {tag: 'role_{i}'}}}}",
            FixedModel(SharedBase("a/b", 1), generation=TaggedSections("role_{i}")),
        ),
    ]:
        config = parser.parse_args([f"--comparator={text}"])
        made = parser.instantiate(config).comparator
        assert to_plain(made) == to_plain(expected)
