"""Rollouts of one and of several turns, with a team whose answers say where they stand in the tree."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from comlrl_lightning.rewards import RewardProcessors, WeightedRewards
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.types import Node
from tests.rollouts.fakes import KEY, SAMPLING, FakeTeam, Formatter, Recorder, World, make_collector

ITEM = {"prompt": "p", "target": 3}


def node_texts(node: Node) -> list[list[str]]:
    return [[completion.text for completion in group] for group in node.completions]


class TestWorkedExample:
    """Two agents, aligned, K=2, T=2, one item: the example that the documentation walks through."""

    item: ClassVar[dict[str, Any]] = {"prompt": "p"}

    def test_turn_1(self) -> None:
        team, reward, formatters = FakeTeam(2), Recorder(), [Formatter("f0"), Formatter("f1")]
        make_collector(team, reward, formatters=formatters).collect([self.item], [0])
        assert [request.prompt for request in team.calls[0]] == ["f0(p)", "f1(p)"]
        assert [formatter.calls for formatter in formatters] == [[({"prompt": "p"}, None)]] * 2
        ((completions, keywords),) = reward.calls
        assert completions == (["a1", "a2"], ["b1", "b2"])
        assert keywords["batch_items"] == [self.item]
        assert keywords["turn"] == 1
        assert keywords["prompts"] == ["f0(p)", "f1(p)"]

    def test_the_transition_gets_both_joint_completions_in_order(self) -> None:
        world = World()
        formatters = [Formatter("f0"), Formatter("f1")]
        make_collector(FakeTeam(2), transition=world, formatters=formatters, num_turns=2).collect([self.item], [0])
        assert [call["agent_completions"] for call in world.calls] == [["a1", "b1"], ["a2", "b2"]]
        assert world.calls[0] == {
            "prompt": "p",
            "agent_completions": ["a1", "b1"],
            "num_agents": 2,
            "prompt_history_per_agent": [["f0(p)"], ["f1(p)"]],
            "response_history_per_agent": [["a1"], ["b1"]],
            "item": self.item,
        }

    def test_child_prompts_come_from_the_formatters(self) -> None:
        team, formatters = FakeTeam(2), [Formatter("f0"), Formatter("f1")]
        make_collector(team, formatters=formatters, num_turns=2).collect([self.item], [0])
        assert [request.prompt for request in team.calls[1]] == ["f0(x)", "f1(y)"] * 2
        assert formatters[0].calls[1:] == [({"prompt": "x"}, "x")] * 2
        assert formatters[1].calls[1:] == [({"prompt": "y"}, "y")] * 2

    def test_the_records(self) -> None:
        rewards = {"a1 b1": 1.0, "a2 b2": 2.0, "a11 b11": 3.0, "a12 b12": 4.0, "a21 b21": 5.0, "a22 b22": 6.0}
        collector = make_collector(FakeTeam(2), Recorder(rewards), num_turns=2)
        rollouts = collector.collect([self.item], [5])
        root, first, second = rollouts.nodes
        assert (root.turn, root.path, root.parent, root.joint) == (1, (), None, ((0, 0), (1, 1)))
        assert (first.turn, first.path, first.parent) == (2, (0,), (0, 0))
        assert (second.turn, second.path, second.parent) == (2, (1,), (0, 1))
        assert [node_texts(node) for node in rollouts.nodes] == [
            [["a1", "a2"], ["b1", "b2"]],
            [["a11", "a12"], ["b11", "b12"]],
            [["a21", "a22"], ["b21", "b22"]],
        ]
        assert [node.rewards for node in rollouts.nodes] == [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]
        assert rollouts.items == (self.item,)
        assert rollouts.indices == (5,)
        assert rollouts.num_scored == 6


class TestJointCompletions:
    def test_aligned_pairs_the_kth_ones(self) -> None:
        reward = Recorder()
        (node,) = make_collector(FakeTeam(3), reward, num_generations=3).collect([ITEM], [0]).nodes
        assert node.joint == ((0, 0, 0), (1, 1, 1), (2, 2, 2))
        assert reward.calls[0][0] == (["a1", "a2", "a3"], ["b1", "b2", "b3"], ["c1", "c2", "c3"])

    def test_cross_takes_every_combination_the_last_agent_varying_fastest(self) -> None:
        reward = Recorder({"a1 b2": 7.0})
        (node,) = make_collector(FakeTeam(2), reward, joint_mode="cross").collect([ITEM], [0]).nodes
        assert node.joint == ((0, 0), (0, 1), (1, 0), (1, 1))
        assert reward.calls[0][0] == (["a1", "a1", "a2", "a2"], ["b1", "b2", "b1", "b2"])
        assert node.rewards == (0.0, 7.0, 0.0, 0.0)
        assert [completion.text for completion in node.joint_completion(2)] == ["a2", "b1"]

    def test_each_joint_completion_spawns_a_child(self) -> None:
        world = World()
        collector = make_collector(FakeTeam(2), transition=world, joint_mode="cross", num_turns=2)
        rollouts = collector.collect([ITEM], [0])
        assert [node.path for node in rollouts.nodes] == [(), (0,), (1,), (2,), (3,)]
        joint = [["a1", "b1"], ["a1", "b2"], ["a2", "b1"], ["a2", "b2"]]
        assert [call["agent_completions"] for call in world.calls] == joint

    @pytest.mark.parametrize(
        ("num_agents", "joint_mode", "num_generations", "num_turns", "expected"),
        [
            (1, "aligned", 4, 1, 4),
            (2, "aligned", 4, 2, 20),  # 4 + 4 * 4
            (2, "cross", 4, 2, 272),  # 4^2 + 4^2 * 4^2
            (1, "cross", 4, 2, 20),  # one agent: cross is aligned
        ],
    )
    def test_number_of_scored_joint_completions(
        self, num_agents: int, joint_mode: str, num_generations: int, num_turns: int, expected: int
    ) -> None:
        collector = make_collector(
            FakeTeam(num_agents), joint_mode=joint_mode, num_generations=num_generations, num_turns=num_turns
        )
        rollouts = collector.collect([ITEM], [0])
        assert rollouts.num_scored == expected
        assert len(rollouts.nodes) == collector.shape.num_nodes(num_agents)


class TestOneGenerationPerTurn:
    def test_all_items_nodes_agents_and_samples_go_in_one_call(self) -> None:
        team = FakeTeam(2)
        make_collector(team, num_turns=3).collect([ITEM, ITEM, ITEM], [0, 1, 2])
        # 3 items and 2 agents; each joint completion (K=2) of a turn makes a node of the next.
        assert [len(call) for call in team.calls] == [3 * 2, 3 * 2 * 2, 3 * 2 * 4]
        assert team.samplings == [SAMPLING] * 3

    def test_keys_name_seed_item_path_agent_and_sample(self) -> None:
        team = FakeTeam(2)
        make_collector(team, num_turns=2).collect([ITEM, ITEM], [40, 12])
        first, second = team.calls
        assert [request.agent for request in first] == [0, 1, 0, 1]
        assert first[2].keys == ((*KEY, 12, 0, 0), (*KEY, 12, 0, 1))
        # Nodes of turn 2: item 40 paths (0,) and (1,), item 12 paths (0,) and (1,); two agents each.
        assert second[3].keys == ((*KEY, 40, 1, 1, 0), (*KEY, 40, 1, 1, 1))
        assert second[4].keys == ((*KEY, 12, 0, 0, 0), (*KEY, 12, 0, 0, 1))
        keys = [key for call in team.calls for request in call for key in request.keys]
        assert len(set(keys)) == len(keys) == 2 * 2 * 2 + 2 * 2 * 2 * 2

    def test_an_item_alone_gets_what_it_gets_in_a_batch(self) -> None:
        collector = make_collector(FakeTeam(2), num_turns=2)
        batch, alone = collector.collect([ITEM, {"prompt": "q"}], [3, 9]), collector.collect([{"prompt": "q"}], [9])
        in_batch = [node.completions for node in batch.nodes if node.task == 1]
        assert in_batch == [node.completions for node in alone.nodes]

    def test_nothing_to_do(self) -> None:
        team = FakeTeam(2)
        rollouts = make_collector(team).collect([], [])
        assert rollouts.nodes == ()
        assert team.calls == []


class TestOrderAndHistories:
    def test_nodes_stand_breadth_first(self) -> None:
        rollouts = make_collector(FakeTeam(1), num_turns=3).collect([ITEM, ITEM], [0, 1])
        places = [(node.turn, node.task, node.path) for node in rollouts.nodes]
        assert places == [
            *((1, task, ()) for task in (0, 1)),
            *((2, task, (k,)) for task in (0, 1) for k in (0, 1)),
            *((3, task, (k, m)) for task in (0, 1) for k in (0, 1) for m in (0, 1)),
        ]

    def test_parents_point_at_the_node_and_the_joint_completion_that_was_followed(self) -> None:
        rollouts = make_collector(FakeTeam(2), joint_mode="cross", num_turns=3).collect([ITEM, ITEM], [0, 1])
        for node in rollouts.nodes[2:]:
            assert node.parent is not None
            position, joint_index = node.parent
            parent = rollouts.nodes[position]
            assert (parent.task, parent.turn) == (node.task, node.turn - 1)
            assert (*parent.path, joint_index) == node.path

    def test_histories_hold_every_turn_of_the_own_branch(self) -> None:
        world = World()
        make_collector(FakeTeam(2), transition=world, num_turns=3).collect([ITEM], [0])
        last = world.calls[-1]  # below the second joint completion of both turns
        assert last["agent_completions"] == ["a22", "b22"]
        assert last["response_history_per_agent"] == [["a2", "a22"], ["b2", "b22"]]
        assert last["prompt_history_per_agent"] == [["p", "x"], ["p", "y"]]
        assert last["prompt"] == "p"

    def test_a_world_that_changes_its_histories_changes_nobody_elses(self) -> None:
        seen = []

        def transition(prompt_history_per_agent: list[list[str]], response_history_per_agent: list[list[str]]) -> Any:
            seen.append([list(history) for history in response_history_per_agent])
            prompt_history_per_agent[0].append("spoiled")
            response_history_per_agent[0].append("spoiled")
            return ("x", "y")

        make_collector(FakeTeam(2), transition=transition, num_turns=3).collect([ITEM], [0])
        assert seen[2] == [["a1", "a11"], ["b1", "b11"]]

    def test_an_item_without_a_prompt_gives_the_transition_an_empty_one(self) -> None:
        world = World()
        collector = make_collector(FakeTeam(1), transition=world, formatters=lambda item: "f", num_turns=2)
        collector.collect([{"level": 1}], [0])
        assert world.calls[0]["prompt"] == ""

    def test_rewards_see_the_original_item_at_every_turn(self) -> None:
        reward = Recorder()
        make_collector(FakeTeam(2), reward, num_turns=2).collect([ITEM], [0])
        assert [keywords["turn"] for _, keywords in reward.calls] == [1, 2, 2]
        assert all(keywords["batch_items"][0] == ITEM for _, keywords in reward.calls)
        assert reward.calls[1][1]["prompts"] == ["x", "y"]

    def test_passthrough_uses_the_worlds_prompts_as_they_are(self) -> None:
        team, formatters = FakeTeam(2), [Formatter("f0"), Formatter("f1")]
        make_collector(team, formatters=formatters, passthrough=True, num_turns=2).collect([ITEM], [0])
        assert [request.prompt for request in team.calls[1]] == ["x", "y"] * 2
        assert len(formatters[0].calls) == 1


@pytest.mark.parametrize("trajectories", [False, True])
def test_rewards_may_ask_for_lengths(trajectories: bool) -> None:
    def reward(first: list[str], second: list[str], num_tokens: Any, truncated: Any) -> list[float]:
        asked.append((first, second, num_tokens, truncated))
        return [0.0] * len(first)

    asked: list[Any] = []
    rollouts = make_collector(FakeTeam(2), reward, num_generations=3, trajectories=trajectories).collect([ITEM], [0])
    ((first, second, num_tokens, truncated),) = asked
    sampled = [node.joint_completion(index) for node in rollouts.nodes for index in range(len(node.joint))]
    assert [(one.text, other.text) for one, other in sampled] == list(zip(first, second, strict=True))
    assert num_tokens == [[len(joint[agent].token_ids) for joint in sampled] for agent in range(2)]
    assert truncated == [[joint[agent].truncated for joint in sampled] for agent in range(2)]


def test_parts_of_a_sum_may_ask_for_lengths_too() -> None:
    def short(first: list[str], num_tokens: Any) -> list[float]:
        return [-float(count) for count in num_tokens[0]]

    collector = make_collector(FakeTeam(1), WeightedRewards({"short": short}), num_generations=2)
    (node,) = collector.collect([ITEM], [0]).nodes
    assert node.rewards == tuple(-float(len(one.token_ids)) for one in node.completions[0])


class TestEarlyTermination:
    @pytest.mark.parametrize(
        ("rule", "paths"), [("completion", [((1,), (0, 1))]), ("group", [((0,), (0, 0)), ((1,), (0, 1))])]
    )
    def test_what_is_above_the_threshold_is_not_followed(self, rule: str, paths: list[Any]) -> None:
        # Roots: item 0 has rewards (1, 0), of which the first exceeds .5 and their mean does not; item 1 has (1, 1).
        def reward(first: list[str], batch_items: list[dict[str, Any]], turn: int) -> list[float]:
            return [1.0, batch_items[0]["level"]] if turn == 1 else [0.0, 0.0]

        items = [{"prompt": "p", "level": 0.0}, {"prompt": "q", "level": 1.0}]
        shape: dict[str, Any] = {"num_turns": 2, "early_termination_threshold": 0.5, "early_termination": rule}
        rollouts = make_collector(FakeTeam(1), reward, **shape).collect(items, [0, 1])
        assert [(node.turn, node.task) for node in rollouts.nodes[:2]] == [(1, 0), (1, 1)]
        assert [(node.path, node.parent) for node in rollouts.nodes[2:]] == paths

    def test_a_stopped_root_ends_the_rollout(self) -> None:
        # Aligned K=4, T=2: 20 joint completions, 4 when the root stops.
        team = FakeTeam(2)
        collector = make_collector(team, num_generations=4, num_turns=2, early_termination_threshold=-0.1)
        assert collector.collect([ITEM], [0]).num_scored == 4
        assert len(team.calls) == 1

    def test_one_branch_stops_and_its_sibling_goes_on(self) -> None:
        # Turn 2 below the first joint completion: 4 and 0; 4 exceeds 1, and so does the mean 2. Below the second: 0.
        reward = Recorder({"a11 b11": 4.0})
        shape: dict[str, Any] = {"num_turns": 3, "early_termination_threshold": 1.0}
        paths = [node.path for node in make_collector(FakeTeam(2), reward, **shape).collect([ITEM], [0]).nodes]
        assert paths == [(), (0,), (1,), (0, 1), (1, 0), (1, 1)]
        shape["early_termination"] = "group"
        paths = [node.path for node in make_collector(FakeTeam(2), reward, **shape).collect([ITEM], [0]).nodes]
        assert paths == [(), (0,), (1,), (1, 0), (1, 1)]

    def test_processed_rewards_are_compared(self) -> None:
        # Raw mean 5; divided by ten it is .5, which does not exceed 1.
        reward = Recorder({"a1": 5.0, "a2": 5.0})
        settings: dict[str, Any] = {"num_turns": 2, "early_termination_threshold": 1.0}
        scaled = make_collector(FakeTeam(1), reward, processor=RewardProcessors.scale(0.1), **settings)
        rollouts = scaled.collect([ITEM], [0])
        assert rollouts.nodes[0].rewards == (0.5, 0.5)
        assert len(rollouts.nodes) == 3
        assert len(make_collector(FakeTeam(1), reward, **settings).collect([ITEM], [0]).nodes) == 1

    def test_no_threshold_never_stops(self) -> None:
        reward = Recorder({"a1": 1e9, "a2": 1e9})
        assert len(make_collector(FakeTeam(1), reward, num_turns=2).collect([ITEM], [0]).nodes) == 3


class TestShape:
    def test_largest_number_of_nodes(self) -> None:
        # 1 + 4 + 16; cross with 3 agents: 1 + 64 + 4096.
        assert RolloutShape(4, 3, "aligned").num_nodes(3) == 21
        assert RolloutShape(4, 3, "cross").num_nodes(3) == 4161

    def test_counts_start_at_one(self) -> None:
        with pytest.raises(ValueError, match="num_generations=0 is out of range"):
            RolloutShape(num_generations=0)
        with pytest.raises(ValueError, match="num_turns=0 is out of range"):
            RolloutShape(num_turns=0)

    @pytest.mark.parametrize("value", [2.5, True, "2"])
    def test_counts_are_whole_numbers(self, value: Any) -> None:
        with pytest.raises(ValueError, match=f"num_turns={value!r} is out of range. Use a whole number"):
            RolloutShape(num_turns=value)

    def test_unknown_joint_mode(self) -> None:
        with pytest.raises(ValueError, match="joint_mode='paired' is unknown"):
            RolloutShape(joint_mode="paired")


def test_progress_hears_turn_and_running_rows() -> None:
    heard: list[tuple[int, int]] = []
    collector = make_collector(FakeTeam(2), num_turns=2, progress=lambda turn, rows: heard.append((turn, rows)))
    collector.collect([ITEM], [0])
    # Turn 1: 2 agents x K=2; turn 2: two nodes of the same.
    assert heard == [(1, 4), (2, 8)]


def test_times_add_up_over_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that advances by 1, then by 10, and so on: each turn is read before sampling, before and after scoring.
    ticks = iter([0.0, 1.0, 11.0, 12.0, 13.0, 23.0])
    monkeypatch.setattr("comlrl_lightning.rollouts.collect.time.perf_counter", lambda: next(ticks))
    rollouts = make_collector(FakeTeam(1), num_turns=2).collect([ITEM], [0])
    assert rollouts.generation_seconds == 1.0 + 1.0
    assert rollouts.reward_seconds == 10.0 + 10.0


class TestMistakesInUserCode:
    """An exception keeps its type and gets a note that names the function, the task item and the turn."""

    def notes(self, fails: str, at_call: int) -> str:
        """What is noted when a function fails at its n-th call."""
        calls = []

        def run(name: str, result: Any) -> Any:
            calls.append(name)
            if name == fails and calls.count(name) == at_call:
                raise KeyError("lost")
            return result

        def formatter(item: dict[str, Any]) -> str:
            return str(run("formatter", item["prompt"]))

        def reward(first: list[str]) -> list[float]:
            return list(run("reward", [0.0] * len(first)))

        def transition() -> list[str]:
            return list(run("transition", ["x"]))

        collector = make_collector(FakeTeam(1), reward, formatters=formatter, transition=transition, num_turns=3)
        with pytest.raises(KeyError, match="lost") as caught:
            collector.collect([ITEM], [17])
        (note,) = caught.value.__notes__
        assert fails in note
        assert "task item 17" in note
        return str(note)

    def test_reward(self) -> None:
        assert "at turn 1" in self.notes("reward", 1)
        assert "at turn 2" in self.notes("reward", 2)

    def test_transition(self) -> None:
        # It answers twice after turn 1 (K=2), then after turn 2.
        assert "at turn 1" in self.notes("transition", 2)
        assert "at turn 2" in self.notes("transition", 3)

    def test_formatter(self) -> None:
        assert "at turn 1" in self.notes("formatter", 1)
        assert "at turn 2" in self.notes("formatter", 2)
        assert "at turn 3" in self.notes("formatter", 4)
