"""Joint texts that are too long: what goes first, and what stays."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
from tokenizers import processors

from comlrl_lightning.critics.critics import CriticType
from comlrl_lightning.critics.inputs import CriticReader, even_shares
from comlrl_lightning.critics.loading import build_critics
from comlrl_lightning.critics.settings import AdapterCritic, CriticSettings, ModelCritic
from comlrl_lightning.types import Completion, Prompt
from tests.agents.critics import samples
from tests.agents.helpers import shared_team
from tests.tiny_lm import BOS, EOS, tiny_gpt2, tiny_tokenizer

# Bytes of the headings: 20 and 22 of the prompts, 26 each of the completions, and one token for the beginning.
HEADINGS = 95
PROMPTS = ("abcdefgh", "wxyz")
ANSWERS = ("12345678", "ABCD")


def written(prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Completion]:
    pairs = zip(prompts, answers, strict=True)
    return [Completion(agent, prompt, (), (), (), text, False) for agent, (prompt, text) in enumerate(pairs)]


def layout(prompts: Sequence[str], answers: Sequence[str]) -> str:
    parts = [f"[Prompt of agent {agent}]\n{text}" for agent, text in enumerate(prompts)]
    parts += [f"[Completion of agent {agent}]\n{text}" for agent, text in enumerate(answers)]
    return "\n\n".join(parts)


@pytest.mark.parametrize(
    ("sizes", "room", "kept"),
    [
        ([8, 4], 12, [8, 4]),
        ([8, 4], 6, [4, 2]),
        # 7 * 8 / 12 = 4.67 and 7 * 4 / 12 = 2.33: whole tokens only.
        ([8, 4], 7, [4, 2]),
        # Shares of 0 become 1, which the largest part pays for: 100 * 10 / 103 = 9 + 1 + 1 + 1.
        ([100, 1, 1, 1], 10, [7, 1, 1, 1]),
        ([5, 0, 5], 2, [1, 0, 1]),
        ([5, 0, 5], 1, [0, 0, 0]),
        ([], 0, []),
        ([0, 0], 0, [0, 0]),
    ],
)
def test_even_shares(sizes: list[int], room: int, kept: list[int]) -> None:
    assert even_shares(sizes, room) == kept


@pytest.mark.parametrize(
    ("room", "prompts", "answers"),
    [
        (24, PROMPTS, ANSWERS),
        # 12 tokens of answers leave 6 of 12 for prompts: half of each.
        (18, ("efgh", "yz"), ANSWERS),
        # 2 of 12: a sixth of 8 is 1, of 4 is less than 1.
        (14, ("h", "z"), ANSWERS),
        # One token cannot be shared.
        (13, ("", ""), ANSWERS),
        (12, ("", ""), ANSWERS),
        (9, ("", ""), ("345678", "BCD")),
        (6, ("", ""), ("5678", "CD")),
        (2, ("", ""), ("8", "D")),
    ],
)
@pytest.mark.filterwarnings("ignore:reward_model was to read")
def test_prompts_are_cut_before_answers_and_all_alike(
    room: int, prompts: Sequence[str], answers: Sequence[str]
) -> None:
    reader = CriticReader(tiny_tokenizer(), "joint", True, HEADINGS + room, "reward_model")
    ids = reader.ids(written(PROMPTS, ANSWERS))
    assert reader.tokenizer.decode(ids) == BOS + layout(prompts, answers)
    assert len(ids) <= HEADINGS + room


@pytest.mark.filterwarnings("ignore:critic was to read")
def test_what_a_tokenizer_adds_stays() -> None:
    both = tiny_tokenizer()
    both.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 256), (EOS, 257)]
    )
    none = tiny_tokenizer(add_bos=False)
    for tokenizer, num_added, text in ((both, 2, f"{BOS}{{}}{EOS}"), (none, 0, "{}")):
        reader = CriticReader(tokenizer, "joint", True, HEADINGS - 1 + num_added + 6)
        ids = reader.ids(written(PROMPTS, ANSWERS))
        assert tokenizer.decode(ids) == text.format(layout(("", ""), ("5678", "CD")))


def test_the_warning_comes_once() -> None:
    reader = CriticReader(tiny_tokenizer(), "joint", True, HEADINGS + 12, "reward_model")
    with pytest.warns(UserWarning, match="reward_model was to read 119 tokens, more than the 107 .*before answers"):
        reader.ids(written(PROMPTS, ANSWERS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.ids(written(PROMPTS, ANSWERS))


def test_an_agent_without_any_messages_has_no_heading() -> None:
    reader = CriticReader(tiny_tokenizer(), "joint", True, None)
    text = "[Prompt of agent 0]\nboth\n\n[Completion of agent 0]\nx\n\n[Completion of agent 1]\ny"
    assert reader.tokenizer.decode(reader.ids(written(["both", []], "xy"))) == BOS + text
    # An empty text is a prompt.
    text = f"[Prompt of agent 0]\n\n\n{text[26:]}"
    assert reader.tokenizer.decode(reader.ids(written(["", []], "xy"))) == BOS + text


def test_a_limit_below_the_headings_is_an_error_from_the_start() -> None:
    def build(settings: CriticSettings, critic_type: CriticType = "q") -> None:
        build_critics(settings, shared_team(), centralized=True, critic_type=critic_type)

    message = r"critic can read 96 tokens, but 95 are headings, .*answers of 2 agents. Raise max_tokens, or use"
    with pytest.raises(ValueError, match=message):
        build(AdapterCritic(max_tokens=96))
    build(AdapterCritic(max_tokens=97))
    # Prompts alone have no such bound, and the model's own limit counts as well.
    build(AdapterCritic(max_tokens=6), "v")
    with pytest.raises(ValueError, match="critic can read 90 tokens, but 95 are"):
        build(ModelCritic(tiny_gpt2(n_positions=90), tokenizer=tiny_tokenizer()))


def test_no_room_for_more_answers_than_agents() -> None:
    reader = CriticReader(tiny_tokenizer(), "joint", True, HEADINGS + 2)
    reader.check_room(2)
    with pytest.warns(UserWarning, match="was to read"), pytest.raises(ValueError, match="the answers of 3 agents"):
        reader.ids(written(["p"] * 3, "xyz"))


def test_values_of_long_texts_see_every_answer() -> None:
    team = shared_team()
    critics = build_critics(AdapterCritic(max_tokens=HEADINGS + 20), team, centralized=True, critic_type="q")
    both: list[tuple[Prompt, str]] = [("a" * 300, "1" * 50), ("b" * 300, "2" * 50)]
    other = [(both[0][0], "1" * 49 + "0"), both[1]]
    with pytest.warns(UserWarning, match="prompts before answers"):
        assert critics.lengths(samples(team, both, other)) == [HEADINGS + 20] * 2
    ids = [critics.bodies[0].reader.ids(sample) for sample in samples(team, both, other)]
    assert ids[0] != ids[1]
