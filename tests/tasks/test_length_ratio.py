"""The length-ratio task, checked by hand and without a model."""

import math
import subprocess
import sys
from dataclasses import dataclass

import pytest

from comlrl_lightning.tasks import length_ratio

ITEM = {"prompt": "Tell.", "target_min": 2.0, "target_max": 3.0}


@dataclass
class Record:
    completion: str


def test_items() -> None:
    train, held_out = length_ratio.train_items(), length_ratio.eval_items()
    prompts = [item["prompt"] for item in train + held_out]
    assert (len(train), len(held_out)) == (32, 8)
    assert len(set(prompts)) == 40
    assert prompts[0] == "Tell a story about a fox in the forest."
    assert "Tell a story about an owl in the village." in prompts
    assert all((item["target_min"], item["target_max"]) == (2.0, 3.0) for item in train + held_out)


def test_items_are_fresh_copies() -> None:
    length_ratio.train_items()[0]["prompt"] = "changed"
    assert length_ratio.train_items()[0]["prompt"] != "changed"


def test_open_items_split_ten_prompts() -> None:
    items = length_ratio.open_train_items() + length_ratio.open_eval_items()
    assert tuple(item["prompt"] for item in items) == length_ratio.OPEN_PROMPTS
    assert len(length_ratio.OPEN_PROMPTS) == 10
    assert len(length_ratio.open_eval_items()) == 2


def test_formatters() -> None:
    assert length_ratio.brief_formatter(ITEM) == "Write a short response to this task:\nTell."
    assert length_ratio.detailed_formatter(ITEM) == "Write a detailed response to this task:\nTell."


def test_reward_of_single_pairs() -> None:
    assert length_ratio.reward_func(["Hi"], ["Hello"], batch_items=[ITEM]) == [1.0]
    assert length_ratio.reward_func([""], ["Hello"], batch_items=[ITEM]) == [0.0]


def test_reward_falls_with_the_distance() -> None:
    # Briefs of 4 characters; ratios 0, 1, 2, 3 and 5, so distances 2, 1, 0, 0 and 2.
    rewards = length_ratio.reward_func(["abcd"] * 5, ["x" * n for n in (0, 4, 8, 12, 20)], batch_items=[ITEM])
    assert rewards == [math.exp(-2), math.exp(-1), 1.0, 1.0, math.exp(-2)]


def test_reward_reads_the_items_range() -> None:
    item = {"prompt": "", "target_min": 1, "target_max": 1.5}
    # Ratio 2.5 is 1.0 above 1.5.
    assert length_ratio.reward_func(["ab"], ["abcde"], batch_items=[item]) == [math.exp(-1.0)]


@pytest.mark.parametrize(
    ("brief", "detailed", "expected"),
    [
        ("ab", "abc", ("The ratio was 0.5 too low. Write less.", "The ratio was 0.5 too low. Write more.")),
        ("ab", "x" * 8, ("The ratio was 1.0 too high. Write more.", "The ratio was 1.0 too high. Write less.")),
        ("a", "x" * 99, ("The ratio was 9.9 too high. Write more.", "The ratio was 9.9 too high. Write less.")),
        ("ab", "abcde", ("The ratio was right. Write as before.",) * 2),
        ("", "abc", ("The short text was empty. Write more.", "The short text was empty. Write as before.")),
    ],
)
def test_transition_tells_each_agent(brief: str, detailed: str, expected: tuple[str, str]) -> None:
    answer = length_ratio.external_transition(prompt="Tell.", agent_completions=(brief, detailed), item=ITEM)
    assert answer == tuple(f"Tell.\n{sentence}" for sentence in expected)


def test_transition_needs_two_agents() -> None:
    with pytest.raises(ValueError, match="completions of 3 agents"):
        length_ratio.external_transition(prompt="Tell.", agent_completions=("a", "b", "c"), item=ITEM)


def test_eval_metrics() -> None:
    # Item 0: (2 + 4) / 2 = 3 at turn 1, (6 + 0) / 2 = 3 at turn 2. Item 1: (1 + 9) / 2 = 5 and (0 + 2) / 2 = 1.
    completions = [[["ab", "x" * 6], ["a", ""]], [["abcd", ""], ["x" * 9, "ab"]]]
    rows = length_ratio.eval_logger(agent_completions_turns=completions, batch_items=[ITEM, ITEM], prompts=["", ""])
    assert rows == [
        {"turn_1/response_chars": 3.0, "turn_2/response_chars": 3.0},
        {"turn_1/response_chars": 5.0, "turn_2/response_chars": 1.0},
    ]
    assert length_ratio.eval_aggregator(rows, num_turns=2) == {
        "turn_1/response_chars": 4.0,
        "turn_2/response_chars": 2.0,
    }
    assert length_ratio.eval_aggregator([], num_turns=2) == {}


def test_metrics_callback() -> None:
    assert length_ratio.metrics_callback([Record("ab"), Record("abcd")]) == {"response_chars": 3.0}
    assert length_ratio.metrics_callback([]) == {}


def test_tasks_import_no_heavy_library() -> None:
    code = (
        "import sys, comlrl_lightning.tasks.length_ratio\n"
        "print(sorted({'torch', 'lightning', 'transformers', 'peft'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
