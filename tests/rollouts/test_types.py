"""Records: merging those of several collections, and values that a checkpoint can hold."""

from __future__ import annotations

import io
from typing import Any

import torch

from comlrl_lightning.rollouts.credit import CreditedNode, assign_credit
from comlrl_lightning.types import Rollouts, joint_indices, merge_rollouts, texts
from tests.rollouts.fakes import FakeTeam, make_collector


def items(*levels: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{level}"} for level in levels]


def test_joint_indices() -> None:
    assert joint_indices(2, 2, "aligned") == ((0, 0), (1, 1))
    assert joint_indices(2, 2, "cross") == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert len(joint_indices(3, 4, "cross")) == 64


def test_texts_repeat_a_completion_for_each_of_its_joint_completions() -> None:
    (node,) = make_collector(FakeTeam(2), joint_mode="cross").collect(items(0), [0]).nodes
    assert texts(node) == [["a1", "a1", "a2", "a2"], ["b1", "b2", "b1", "b2"]]


class TestMerge:
    def test_two_collections_become_the_one_that_rolls_all_items_out_together(self) -> None:
        collector = make_collector(FakeTeam(2), num_turns=3)
        whole = collector.collect(items(0, 1, 2, 3, 4), [0, 1, 2, 3, 4])
        parts = [collector.collect(items(4, 1), [4, 1]), collector.collect(items(0, 2, 3), [0, 2, 3])]
        merged = merge_rollouts(parts)
        assert merged.items == whole.items
        assert merged.indices == whole.indices
        assert merged.nodes == whole.nodes

    def test_times_add_up(self) -> None:
        parts = [Rollouts((), (), (), 1.0, 0.25), Rollouts((), (), (), 2.0, 0.5)]
        merged = merge_rollouts(parts)
        assert (merged.generation_seconds, merged.reward_seconds) == (3.0, 0.75)

    def test_nothing(self) -> None:
        assert merge_rollouts([]) == Rollouts((), (), ())


class TestState:
    def test_a_node_survives_a_checkpoint_that_loads_plain_values_only(self) -> None:
        messages = [{"role": "user", "content": "hello"}]
        collector = make_collector(FakeTeam(2), formatters=lambda item: messages, joint_mode="cross", num_turns=2)
        credited = assign_credit(collector.collect(items(0), [0]), 0.5)
        file = io.BytesIO()
        torch.save([entry.to_state() for entry in credited], file)
        file.seek(0)
        loaded = [CreditedNode.from_state(state) for state in torch.load(file, weights_only=True)]
        assert loaded == credited
        assert loaded[1].node.completions[1][0].prompt == messages
        assert loaded[1].node.parent == (0, 0)

    def test_the_state_is_a_copy(self) -> None:
        messages = [{"role": "user", "content": "hello"}]
        collector = make_collector(FakeTeam(1), formatters=lambda item: messages)
        (entry,) = assign_credit(collector.collect(items(0), [0]), 1.0)
        state = entry.to_state()
        messages[0]["content"] = "changed"
        assert state["node"]["prompts"][0][0]["content"] == "hello"
