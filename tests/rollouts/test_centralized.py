"""One model that writes the answers of all agents: rollouts are those of a team that says the same."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from comlrl_lightning.environment.joint_format import TaggedSections
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.rollouts.credit import CreditedNode, assign_credit
from comlrl_lightning.rollouts.recording import prediction, record_unparsed
from comlrl_lightning.types import Node, Prompt, Rollouts, merge_rollouts, texts
from tests.rollouts.fakes import KEY, CentralTeam, FakeTeam, Formatter, Recorder, World, make_collector

ITEM = {"prompt": "p"}
REWARDS = {"a1 b1": 1.0, "a2 b2": 4.0, "a11 b11": 2.0, "a22 b22": 8.0}


class Joined:
    """Prompts are joined by plus signs, answers by commas."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def build_prompt(self, prompts: Sequence[Prompt]) -> Prompt:
        self.dtypes.append(torch.tensor(1.0).dtype)
        return "+".join(map(str, prompts))

    def split_completion(self, text: str, num_agents: int) -> list[str] | None:
        self.dtypes.append(torch.tensor(1.0).dtype)
        return [f"{text}.{agent}" for agent in range(num_agents)]


class TestNode:
    def test_one_turn(self) -> None:
        team, reward, formatters = CentralTeam(2), Recorder(REWARDS), [Formatter("f0"), Formatter("f1")]
        (node,) = make_collector(team, reward, formatters=formatters).collect([ITEM], [5]).nodes
        merged = TaggedSections().build_prompt(["f0(p)", "f1(p)"])
        # One request per item, with a key per completion: item 5, agent 0, sample.
        ((request,),) = team.calls
        assert (request.agent, request.prompt) == (0, merged)
        assert request.keys == ((*KEY, 5, 0, 0), (*KEY, 5, 0, 1))
        assert node.prompts == ("f0(p)", "f1(p)")
        ((first, second),) = node.completions
        assert first.prompt == merged
        assert first.text == "<agent_1> b1 </agent_1><agent_0> a1 </agent_0>"
        assert node.joint == ((0,), (1,))
        assert node.joint_completion(1) == (second,)
        assert node.sections == (("a1", "b1"), ("a2", "b2"))
        assert node.answers(1) == ["a2", "b2"]
        assert texts(node) == [["a1", "a2"], ["b1", "b2"]]
        assert node.rewards == (1.0, 4.0)
        ((completions, keywords),) = reward.calls
        assert completions == (["a1", "a2"], ["b1", "b2"])
        assert keywords["prompts"] == ["f0(p)", "f1(p)"]

    def test_answers_of_a_team_are_its_completions(self) -> None:
        (node,) = make_collector(FakeTeam(2), joint_mode="cross").collect([ITEM], [0]).nodes
        assert node.sections is None
        assert [node.answers(index) for index in range(4)] == [["a1", "b1"], ["a1", "b2"], ["a2", "b1"], ["a2", "b2"]]

    def test_cross_has_nothing_to_combine(self) -> None:
        nodes = [
            make_collector(CentralTeam(3), joint_mode=mode, num_generations=3, num_turns=2).collect([ITEM], [0]).nodes
            for mode in ("aligned", "cross")
        ]
        assert nodes[0] == nodes[1]
        assert len(nodes[0]) == 1 + 3

    def test_messages_of_one_agent_make_the_prompt_messages(self) -> None:
        messages = [{"role": "user", "content": "hello"}]
        collector = make_collector(CentralTeam(2), formatters=[lambda item: messages, lambda item: "hi"])
        (node,) = collector.collect([ITEM], [0]).nodes
        assert node.prompts == (messages, "hi")
        asked = node.completions[0][0].prompt
        assert isinstance(asked, list)
        assert "hello" in asked[0]["content"]
        assert "hi" in asked[0]["content"]

    def test_a_format_of_ones_own(self) -> None:
        joined = Joined()
        team = CentralTeam(2, silent=["a1", "a2"])
        collector = make_collector(team, formatters=[Formatter("f"), Formatter("g")], joint_format=joined)
        rollouts = collector.collect([ITEM], [0])
        assert team.calls[0][0].prompt == "f(p)+g(p)"
        assert texts(rollouts.nodes[0]) == [["only a1.0", "only a2.0"], ["only a1.1", "only a2.1"]]
        assert rollouts.num_unparsed == 0

    def test_a_format_runs_as_code_of_the_user(self) -> None:
        joined = Joined()
        torch.set_default_dtype(torch.bfloat16)
        try:
            make_collector(CentralTeam(2), joint_format=joined, trajectories=True).collect([ITEM], [0])
        finally:
            torch.set_default_dtype(torch.float32)
        assert joined.dtypes == [torch.float32] * 3

    def test_a_team_of_several_agents_does_not_fit(self) -> None:
        with pytest.raises(AssertionError, match="does not fit"):
            make_collector(FakeTeam(2), joint_format=TaggedSections())


def said(rollouts: Rollouts) -> list[Any]:
    """All of the nodes but what was sampled, and from whom."""
    return [
        (node.task, node.turn, node.path, node.parent, node.prompts, texts(node), node.rewards)
        for node in rollouts.nodes
    ]


@pytest.mark.parametrize("trajectories", [False, True], ids=["tree", "trajectories"])
class TestTurns:
    def both(self, trajectories: bool) -> list[tuple[Rollouts, list[Any], list[Any]]]:
        """The rollouts of a team and of one model that says the same, their rewards' and their world's calls."""
        result = []
        for team in (FakeTeam(2), CentralTeam(2)):
            reward, world = Recorder(REWARDS), World()
            formatters = [Formatter("f"), Formatter("g")]
            collector = make_collector(
                team,
                reward,
                transition=world,
                formatters=formatters,
                trajectories=trajectories,
                num_turns=3,
                early_termination_threshold=3.5,
                early_termination="group",
            )
            items = [ITEM, {"prompt": "q"}]
            result.append((collector.collect(items, [3, 8]), reward.calls, world.calls))
        return result

    def test_rewards_transitions_and_histories_are_those_of_the_agents(self, trajectories: bool) -> None:
        (team, rewarded, answered), (central, *calls) = self.both(trajectories)
        assert said(central) == said(team)
        assert calls == [rewarded, answered]
        assert answered[0]["agent_completions"] == ["a1", "b1"]
        assert answered[0]["prompt_history_per_agent"] == [["f(p)"], ["g(p)"]]
        # Threshold 3.5, per item. Tree: the root (mean 2.5), two nodes of means 1 and 4, two below the first of them.
        # Trajectories: the second one ends with its reward 4, the first one has three turns.
        assert len(central.nodes) == 2 * (4 if trajectories else 5)

    def test_credit_is_that_of_one_agent(self, trajectories: bool) -> None:
        (team, *_), (central, *_) = self.both(trajectories)
        of_team, of_one = assign_credit(team, 0.5), assign_credit(central, 0.5)
        assert [entry.joint_returns for entry in of_one] == [entry.joint_returns for entry in of_team]
        # Aligned, so that each completion's return is the one of its joint completion.
        assert [entry.returns for entry in of_one] == [(entry.joint_returns,) for entry in of_team]
        assert [entry.weight for entry in of_one] == [entry.weight for entry in of_team]

    def test_what_has_no_section_is_counted_and_scored(self, trajectories: bool) -> None:
        reward = Recorder({" ": 5.0})
        team = CentralTeam(2, silent=["a2", "a11", "a21"])
        rollouts = make_collector(team, reward, trajectories=trajectories, num_turns=2).collect([ITEM], [0])
        # a1 and a2 at turn 1, then below each of them: trees have samples 1 and 2 (a11, a12, a21, a22), trajectories 1.
        assert rollouts.num_scored == (4 if trajectories else 6)
        assert rollouts.num_unparsed == 3
        unparsed = [
            (node.turn, index)
            for node in rollouts.nodes
            for index, value in enumerate(node.rewards)
            if value == 5.0 and node.answers(index) == ["", ""]
        ]
        assert len(unparsed) == 3


class TestPerAgentRewards:
    def test_one_model_gets_their_mean(self) -> None:
        collector = make_collector(CentralTeam(2), lambda first, second: [[1.0, 2.0], [3.0, 5.0]], per_agent=True)
        rollouts = collector.collect([ITEM], [0])
        assert rollouts.nodes[0].rewards == (1.5, 4.0)
        assert rollouts.nodes[0].agent_rewards is None
        (entry,) = assign_credit(rollouts, 1.0)
        assert entry.returns == ((1.5, 4.0),)


class TestRecords:
    def test_a_node_survives_a_checkpoint(self) -> None:
        credited = assign_credit(make_collector(CentralTeam(2), num_turns=2).collect([ITEM], [0]), 0.5)
        file = io.BytesIO()
        torch.save([entry.to_state() for entry in credited], file)
        file.seek(0)
        assert [CreditedNode.from_state(state) for state in torch.load(file, weights_only=True)] == credited

    def test_a_state_from_before_there_were_sections(self) -> None:
        (node,) = make_collector(FakeTeam(2)).collect([ITEM], [0]).nodes
        state = asdict(node)
        del state["sections"]
        assert Node.from_state(state) == node

    def test_unparsed_completions_add_up_over_collections(self) -> None:
        collector = make_collector(CentralTeam(2, silent=["a1"]), num_turns=2)
        whole = collector.collect([ITEM, ITEM, ITEM], [0, 1, 2])
        merged = merge_rollouts([collector.collect([ITEM, ITEM], [2, 0]), collector.collect([ITEM], [1])])
        assert whole.num_unparsed == merged.num_unparsed == 3
        assert merged.nodes == whole.nodes

    def test_the_share_of_unparsed_completions(self) -> None:
        table = MetricTable(["unparsed_share"], prefix="eval/")
        record_unparsed(table, Rollouts((), (), ()))
        assert table.pop() == {}
        # One of two at the first item's root, two of six with turn 2: 3 / 8, not the mean of 1/2 and 1/3.
        collector = make_collector(CentralTeam(2, silent=["a1"]))
        record_unparsed(table, collector.collect([ITEM], [0]))
        collector = make_collector(CentralTeam(2, silent=["a1", "a22"]), num_turns=2)
        record_unparsed(table, collector.collect([ITEM], [0]))
        assert table.pop() == {"eval/unparsed_share": 3 / 8}

    def test_a_prediction_has_the_prompts_and_answers_of_the_agents(self) -> None:
        collector = make_collector(CentralTeam(2), Recorder(REWARDS), num_generations=1)
        rollouts = collector.collect([ITEM], [4])
        assert prediction(rollouts, rollouts.nodes[0]) == {
            "index": 4,
            "turn": 1,
            "prompts": ["p", "p"],
            "completions": ["a1", "b1"],
            "reward": 1.0,
        }
