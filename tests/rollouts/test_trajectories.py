"""Independent trajectories: K per task, one generation and one reward call per item and turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.rollouts.credit import CreditedNode, Critique, assign_credit
from comlrl_lightning.types import Node
from tests.rollouts.fakes import KEY, FakeTeam, Recorder, World, make_collector

ITEM = {"prompt": "p"}


def collect(num_agents: int = 1, rewards: Mapping[str, float] | None = None, **shape: Any) -> Any:
    collector = make_collector(FakeTeam(num_agents), Recorder(rewards), trajectories=True, **shape)
    return collector.collect([ITEM], [0])


def text(node: Node) -> str:
    return " ".join(group[0].text for group in node.completions)


def test_every_sample_is_a_node_of_its_own() -> None:
    nodes = collect(2, {"a1 b1": 1.0, "a21 b21": 2.0}, num_turns=2).nodes
    assert [text(node) for node in nodes] == ["a1 b1", "a2 b2", "a11 b11", "a21 b21"]
    assert [node.rewards for node in nodes] == [(1.0,), (0.0,), (0.0,), (2.0,)]
    assert {node.joint for node in nodes} == {((0, 0),)}


def test_chains_go_by_path_and_parent() -> None:
    nodes = collect(num_turns=3).nodes
    assert [node.path for node in nodes] == [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)]
    assert [node.parent for node in nodes] == [None, None, (0, 0), (1, 0), (2, 0), (3, 0)]
    assert [node.turn for node in nodes] == [1, 1, 2, 2, 3, 3]


def test_a_trajectory_that_ends_leaves_the_others() -> None:
    # K=4, T=3, one ended after turn 1: 4 + 3 + 3 = 10 scored joint completions.
    rollouts = collect(2, {"a3 b3": 1.0}, num_generations=4, num_turns=3, early_termination_threshold=0.5)
    assert rollouts.num_scored == len(rollouts.nodes) == 10
    assert [node.path[0] for node in rollouts.nodes] == [0, 1, 2, 3, 0, 1, 3, 0, 1, 3]


def test_the_mean_of_the_others_ends_nobody() -> None:
    # As a tree the root's mean reward .6 would stop all.
    rollouts = collect(1, {"a1": 1.2}, num_turns=2, early_termination_threshold=0.5)
    assert [text(node) for node in rollouts.nodes] == ["a1", "a2", "a21"]


def test_one_generation_per_turn_and_one_reward_call_per_item_and_turn() -> None:
    team, reward = FakeTeam(2), Recorder({"a1 b1": 9.0})
    collector = make_collector(
        team, reward, trajectories=True, num_generations=3, num_turns=2, early_termination_threshold=5.0
    )
    collector.collect([ITEM, {"prompt": "q"}], [0, 1])
    # Turn 1: 2 items x 2 agents with three samples each; turn 2: two live trajectories per item.
    assert [[len(request.keys) for request in call] for call in team.calls] == [[3] * 4, [1] * 8]
    assert [(keywords["turn"], keywords["batch_items"][0]["prompt"]) for _, keywords in reward.calls] == [
        (1, "p"),
        (1, "q"),
        (2, "p"),
        (2, "q"),
    ]
    assert [completions for completions, _ in reward.calls[::2]] == [
        (["a1", "a2", "a3"], ["b1", "b2", "b3"]),
        (["a21", "a31"], ["b21", "b31"]),
    ]


def test_rewards_get_prompts_at_the_first_turn_only() -> None:
    reward = Recorder()
    make_collector(FakeTeam(1), reward, trajectories=True, num_turns=2).collect([ITEM], [0])
    assert [keywords.get("prompts") for _, keywords in reward.calls] == [["p"], None]


def test_keys_are_distinct_at_every_turn() -> None:
    team = FakeTeam(2)
    make_collector(team, trajectories=True, num_turns=3).collect([ITEM], [4])
    assert team.calls[0][1].keys == ((*KEY, 4, 1, 0), (*KEY, 4, 1, 1))
    assert team.calls[1][3].keys == ((*KEY, 4, 1, 1, 0),)
    assert team.calls[2][3].keys == ((*KEY, 4, 1, 0, 1, 0),)
    keys = [key for call in team.calls for request in call for key in request.keys]
    assert len(set(keys)) == len(keys) == 2 * 2 * 3


def test_a_single_trajectory_says_what_a_tree_of_one_says() -> None:
    tree = make_collector(FakeTeam(2), num_generations=1, num_turns=3).collect([ITEM], [0])
    assert [text(node) for node in collect(2, num_generations=1, num_turns=3).nodes] == [
        text(node) for node in tree.nodes
    ]


def test_histories_belong_to_the_own_trajectory() -> None:
    world = World()
    make_collector(FakeTeam(1), transition=world, trajectories=True, num_turns=3).collect([ITEM], [0])
    assert [call["response_history_per_agent"] for call in world.calls] == [
        [["a1"]],
        [["a2"]],
        [["a1", "a11"]],
        [["a2", "a21"]],
    ]


def test_number_of_nodes() -> None:
    assert RolloutShape(4, 3, trajectories=True).num_nodes(2) == 12


class TestCredit:
    def test_returns_of_trajectories_and_equal_weights(self) -> None:
        # Discount .5: 1 + .5 * 3 = 2.5 and 2 + .5 * 0 = 2.
        rollouts = collect(2, {"a1 b1": 1.0, "a2 b2": 2.0, "a11 b11": 3.0}, num_turns=2)
        entries = assign_credit(rollouts, 0.5)
        assert [entry.returns for entry in entries] == [((value,), (value,)) for value in (2.5, 2.0, 3.0, 0.0)]
        assert [entry.weight for entry in entries] == [1.0] * 4

    def test_each_agent_may_have_its_own_rewards(self) -> None:
        def reward(first: list[str], second: list[str], turn: int) -> list[list[float]]:
            return [[10.0 * turn, float(len(one))] for one, _ in zip(first, second, strict=True)]

        collector = make_collector(FakeTeam(2), reward, per_agent=True, trajectories=True, num_turns=2)
        nodes = collector.collect([ITEM], [0])
        # The second agent earns the length of "a1", then of "a11"; the joint reward is the mean.
        assert nodes.nodes[0].agent_rewards == ((10.0, 2.0),)
        assert nodes.nodes[2].rewards == (11.5,)
        entries = assign_credit(nodes, 0.5)
        assert entries[0].returns == ((10.0 + 10.0,), (2.0 + 1.5,))
        assert entries[0].joint_returns == (6.0 + 0.5 * 11.5,)

    @pytest.mark.parametrize("critique", [None, Critique((0.5,), (1.0,), (0.25,), (1.0, 2.0))])
    def test_it_goes_through_a_checkpoint(self, critique: Critique | None) -> None:
        (node,) = collect(2, num_generations=1).nodes
        entry = CreditedNode(node, (1.0,), ((1.0,), (1.0,)), 1.0, critique)
        assert CreditedNode.from_state(entry.to_state()) == entry


class TestPerAgentRewards:
    def collect(self, returned: Any, processor: Any = None) -> Any:
        collector = make_collector(FakeTeam(2), lambda first, second: returned, per_agent=True, processor=processor)
        return collector.collect([ITEM], [0]).nodes[0]

    def test_a_tree_takes_them_too(self) -> None:
        node = self.collect([[1.0, 2.0], [3.0, 5.0]], processor=lambda reward: 2 * reward)
        assert node.agent_rewards == ((2.0, 4.0), (6.0, 10.0))
        assert node.rewards == (3.0, 8.0)

    @pytest.mark.parametrize("returned", [[1.0, 2.0], [[1.0, 2.0]], [[1.0], [2.0]], 3.0, [[1.0, float("nan")]] * 2])
    def test_another_shape_is_refused(self, returned: Any) -> None:
        with pytest.raises(ValueError, match=r"task item 0 .*Return a (list of 2 rows with 2 finite floats|finite)"):
            self.collect(returned)
