"""Credit and loss with critics on paper: values and log-probabilities are numbers that a test hands over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.functional import LossAggregation
from comlrl_lightning.learning.actor_critic import ActorCriticLearner, siblings, trajectories
from comlrl_lightning.learning.minibatches import UpdateStats
from comlrl_lightning.learning.settings import PolicySettings, ValueSettings
from comlrl_lightning.metrics import MetricTable, critic_keys, training_keys
from comlrl_lightning.rollouts.credit import CreditedNode, Critique
from comlrl_lightning.types import Completion, Node, Rollouts
from tests.algorithms.test_learner import PaperTeam, completion, minus_one

Values = Callable[[tuple[str, ...]], Sequence[float] | Tensor]


class PaperCritics:
    """Values every joint completion by a function of its texts."""

    def __init__(self, values: Values, num_outputs: int, *, num_critics: int = 1, shared: bool = False) -> None:
        self.function = values
        self.num_outputs = num_outputs
        self.num_critics = num_critics
        self.centralized = num_critics == 1
        self.shared = shared

    def values(self, samples: Sequence[Sequence[Completion]]) -> Tensor:
        rows = [self.function(tuple(one.text for one in sample)) for sample in samples]
        return torch.stack([torch.as_tensor(row, dtype=torch.float64) for row in rows])

    def lengths(self, samples: Sequence[Sequence[Completion]]) -> list[int]:
        return [1] * len(samples)

    def shares_parameters(self) -> bool:
        return self.shared

    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        return {"critic": {}}


def make_learner(
    critics: PaperCritics,
    num_agents: int = 1,
    kl: float = 0.0,
    aggregation: LossAggregation = "sum",
    **value: Any,
) -> ActorCriticLearner:
    policy = PolicySettings(1.0, kl, None, None, "token", 0.0, aggregation, 4, None)
    settings = ValueSettings(
        **{
            "critic_type": "v",
            "critic_learning_rate": None,
            "value_loss_coef": 0.6,
            "value_clip_range": None,
            "gae_lambda": 1.0,
            "advantage_normalization": False,
            **value,
        }
    )
    # The reference policy finds the first answer of any agent less likely by 1.
    team = PaperTeam(num_agents, minus_one, lambda text: torch.tensor(-2.0 if text.endswith("0") else -1.0).double())
    table = MetricTable([*training_keys(3, num_agents, True), *critic_keys(num_agents, ["critic"])])
    return ActorCriticLearner(cast("AgentTeam", team), cast("CriticTeam", critics), policy, settings, 4096, table)


def rollout(*rewards: Sequence[float | Sequence[float]], num_agents: int = 1) -> Rollouts:
    """One task; a row of rewards per trajectory, a number or one per agent for each of its turns."""
    nodes: list[Node] = []
    last: dict[int, int] = {}
    for turn in range(1, max(map(len, rewards)) + 1):
        for k, row in enumerate(rewards):
            if turn > len(row):
                continue
            reward = row[turn - 1]
            own = None if isinstance(reward, float) else (tuple(reward),)
            mean = reward if isinstance(reward, float) else sum(reward) / len(reward)
            parent = (last[k], 0) if turn > 1 else None
            last[k] = len(nodes)
            groups = tuple((completion(agent, f"{turn}{k}"),) for agent in range(num_agents))
            path = (k,) + (0,) * (turn - 1)
            joint = ((0,) * num_agents,)
            nodes.append(Node(0, turn, path, parent, ("p",) * num_agents, groups, joint, (mean,), own))
    return Rollouts(({},), (0,), tuple(nodes))


def by_turn(*values: float) -> Values:
    """The same value for all samples of a turn."""
    return lambda texts: [values[int(texts[0][0]) - 1]]


def critiques(entries: Sequence[CreditedNode]) -> list[Critique]:
    return [entry.critique for entry in entries if entry.critique is not None]


class TestCredit:
    @pytest.mark.parametrize(
        ("gae_lambda", "advantages", "targets"),
        [
            (0.5, (1.65875, 0.575, 0.5), (2.15875, 1.575, 2.0)),
            (0.0, (1.4, 0.35, 0.5), (1.9, 1.35, 2.0)),
            (1.0, (2.12, 0.8, 0.5), (2.62, 1.8, 2.0)),
        ],
    )
    def test_three_turns(self, gae_lambda: float, advantages: Sequence[float], targets: Sequence[float]) -> None:
        # r = (1, 0, 2), V = (.5, 1, 1.5), discount .9; TD errors 1.4, .35, .5 whatever lambda is.
        learner = make_learner(PaperCritics(by_turn(0.5, 1.0, 1.5), 1), gae_lambda=gae_lambda)
        found = critiques(learner.credit(rollout([1.0, 0.0, 2.0]), 0.9))
        assert [one.advantages[0] for one in found] == pytest.approx(advantages)
        assert [one.targets[0] for one in found] == pytest.approx(targets)
        assert [one.td_errors[0] for one in found] == pytest.approx([1.4, 0.35, 0.5])
        assert [one.values for one in found] == [(0.5,), (1.0,), (1.5,)]

    def test_a_trajectory_that_ended_beside_one_that_did_not(self) -> None:
        # Ended at turn 2: advantages .95 and -1, targets 1.45 and 0; the other as above.
        learner = make_learner(PaperCritics(by_turn(0.5, 1.0, 1.5), 1), gae_lambda=0.5)
        entries = learner.credit(rollout([1.0, 0.0, 2.0], [1.0, 0.0]), 0.9)
        ended = critiques([entry for entry in entries if entry.node.path[0] == 1])
        assert [one.advantages[0] for one in ended] == pytest.approx([0.95, -1.0])
        assert [one.targets[0] for one in ended] == pytest.approx([1.45, 0.0])
        others = critiques([entry for entry in entries if entry.node.path[0] == 0])
        assert [one.advantages[0] for one in others] == pytest.approx([1.65875, 0.575, 0.5])

    def test_a_converged_q_still_has_a_gradient(self) -> None:
        # r = a, Q exact: the TD errors are 0, the completions' weights 1 - 0 and 0 - 1.
        exact = {"10": 1.0, "11": 0.0}
        learner = make_learner(PaperCritics(lambda texts: [exact[texts[0]]], 1), critic_type="q")
        found = critiques(learner.credit(rollout([1.0], [0.0]), 1.0))
        assert [one.td_errors for one in found] == [(0.0,), (0.0,)]
        assert [one.advantages for one in found] == [(1.0,), (-1.0,)]

    def test_q_without_siblings_weighs_by_the_target(self) -> None:
        # Two turns of two trajectories: only at turn 1 do they answer the same prompts. Lambda 0, discount .5:
        # targets 1 + .5 * 3 = 2.5 and 2 + .5 * 4 = 4 minus the other's value 20 or 10, then 5 and 6.
        values = {"10": 10.0, "11": 20.0, "20": 3.0, "21": 4.0}
        learner = make_learner(PaperCritics(lambda texts: [values[texts[0]]], 1), critic_type="q", gae_lambda=0.0)
        found = critiques(learner.credit(rollout([1.0, 5.0], [2.0, 6.0]), 0.5))
        assert [one.advantages[0] for one in found] == pytest.approx([2.5 - 20.0, 4.0 - 10.0, 5.0, 6.0])

    def test_independent_critics_judge_for_themselves(self) -> None:
        critics = PaperCritics(lambda texts: [0.25, 0.75], 2, num_critics=2)
        (found,) = critiques(make_learner(critics, 2).credit(rollout([1.0], num_agents=2), 1.0))
        assert found.advantages == (0.75, 0.25)
        assert found.targets == (1.0, 1.0)

    def test_a_central_critic_judges_for_all(self) -> None:
        (found,) = critiques(
            make_learner(PaperCritics(lambda texts: [0.25], 1), 2).credit(rollout([1.0], num_agents=2), 1.0)
        )
        assert found.advantages == (0.75, 0.75)
        assert found.targets == (1.0,)

    def test_rewards_of_each_agent_go_to_its_own_output(self) -> None:
        critics = PaperCritics(lambda texts: [0.5, 1.0], 2)
        (found,) = critiques(make_learner(critics, 2).credit(rollout([(2.0, 30.0)], num_agents=2), 1.0))
        assert found.advantages == (1.5, 29.0)
        assert found.targets == (2.0, 30.0)

    def test_nothing_collected(self) -> None:
        learner = make_learner(PaperCritics(by_turn(0.0), 1))
        assert learner.credit(Rollouts((), (), ()), 1.0) == []
        assert learner.prepare([], 1, stale=False) == []

    def test_chains_and_siblings(self) -> None:
        nodes = rollout([0.0, 0.0], [0.0], [0.0, 0.0]).nodes
        assert trajectories(nodes) == [[0, 3], [1], [2, 4]]
        assert siblings(nodes) == [[0, 1, 2], [3], [4]]


def advantages(learner: ActorCriticLearner, collected: Rollouts) -> list[list[float]]:
    prepared = learner.prepare(learner.credit(collected, 1.0), 1, stale=False)
    return [[row.advantage for row in node.rows] for node in prepared]


class TestAdvantages:
    def test_they_are_centered_and_scaled_per_turn(self) -> None:
        # V = 0: advantages 1, 2, 3, 6 at turn 1 (returns), at turn 2 only 5: a single one stays as it is.
        learner = make_learner(PaperCritics(by_turn(0.0, 0.0), 1), advantage_normalization="batch", gae_lambda=0.0)
        credited = learner.credit(rollout([1.0, 5.0], [2.0], [3.0], [6.0]), 1.0)
        values = learner.advantages(credited, 2, None)
        assert [float(row[0]) for row in values] == pytest.approx([-1.06899, -0.53449, 0.0, 1.60348, 5.0], abs=1e-4)

    def test_or_left_alone(self) -> None:
        values = advantages(make_learner(PaperCritics(by_turn(0.5), 1)), rollout([1.0], [3.0]))
        assert values == [[0.5], [2.5]]

    def test_and_per_agent(self) -> None:
        # The second agent's rewards are 10 times as large: the same advantages.
        learner = make_learner(PaperCritics(lambda texts: [0.0, 0.0], 2), 2, advantage_normalization="batch")
        values = advantages(learner, rollout(*[[(1.0, 10.0)], [(3.0, 30.0)]] * 2, num_agents=2))
        for low, high in zip(values[::2], values[1::2], strict=True):
            assert low == pytest.approx([-1.0, -1.0], abs=1e-3)
            assert high == pytest.approx([1.0, 1.0], abs=1e-3)

    def test_scaling_one_agents_rewards_leaves_the_others_advantages(self) -> None:
        def of_second(size: float) -> list[float]:
            learner = make_learner(PaperCritics(lambda texts: [0.5, 0.5], 2), 2, advantage_normalization="batch")
            rewards = [[(1.0 * size, 1.0)], [(5.0 * size, 3.0)], [(2.0 * size, 7.0)], [(4.0 * size, 2.0)]]
            collected = rollout(*rewards, num_agents=2)
            return [row[1] for row in advantages(learner, collected)]

        assert of_second(1.0) == of_second(100.0)

    def test_the_penalty_comes_after_normalization_and_is_not_centered(self) -> None:
        # kappa = 1 for the first trajectory, 0 for the others: -1 - .5 and 1.
        learner = make_learner(PaperCritics(by_turn(0.0), 1), kl=0.5, advantage_normalization="batch")
        values = advantages(learner, rollout([1.0], [3.0], [3.0], [1.0]))
        assert [row[0] for row in values] == pytest.approx([-1.5, 1.0, 1.0, -1.0], abs=1e-3)
        assert critiques(learner.credit(rollout([1.0]), 1.0))[0].targets == (1.0,)


class TestValueLoss:
    def loss(self, critics: PaperCritics, collected: Rollouts, num_agents: int, **value: Any) -> tuple[Tensor, Any]:
        learner = make_learner(critics, num_agents, **value)
        prepared = learner.prepare(learner.credit(collected, 1.0), 1, stale=False)
        stats = UpdateStats(num_agents)
        total = learner.value_loss([node.value for node in prepared if node.value is not None], stats)
        stats.record(learner.table, len(prepared))
        return total, learner.table.pop()

    def test_critics_of_their_own_add_up(self) -> None:
        # Errors (1 - .5)^2 and (1 - 0)^2 for one joint completion.
        critics = PaperCritics(lambda texts: [0.5, 0.0], 2, num_critics=2)
        total, logged = self.loss(critics, rollout([1.0], num_agents=2), 2)
        assert float(total) == pytest.approx(1.25)
        assert (logged["agent_0/value_loss"], logged["agent_1/value_loss"]) == (0.25, 1.0)

    def test_outputs_of_one_critic_are_averaged(self) -> None:
        critics = PaperCritics(lambda texts: [0.5, 0.0], 2)
        total, _ = self.loss(critics, rollout([(1.0, 1.0)], num_agents=2), 2)
        assert float(total) == pytest.approx(0.625)

    def test_a_joint_completion_enters_a_central_critics_loss_once(self) -> None:
        total, logged = self.loss(PaperCritics(lambda texts: [0.5], 1), rollout([1.0], [2.0], num_agents=2), 2)
        assert float(total) == pytest.approx(0.25 + 2.25)
        assert logged["agent_0/value_loss"] == logged["agent_1/value_loss"] == 1.25

    def test_the_coefficient_counts_where_parameters_are_shared(self) -> None:
        critics = PaperCritics(lambda texts: [0.5], 1, shared=True)
        total, _ = self.loss(critics, rollout([1.0]), 1)
        assert float(total) == pytest.approx(0.6 * 0.25)
        assert float(self.loss(PaperCritics(lambda texts: [0.5], 1), rollout([1.0]), 1)[0]) == pytest.approx(0.25)

    @pytest.mark.parametrize(("shared", "expected"), [(True, 0.6 * 0.25 / 4), (False, 0.25)])
    def test_a_constant_divides_what_reaches_an_agent(self, shared: bool, expected: float) -> None:
        critics = PaperCritics(lambda texts: [0.5], 1, shared=shared)
        total, _ = self.loss(critics, rollout([1.0]), 1, aggregation="constant")
        assert float(total) == pytest.approx(expected)

    def test_values_are_clipped_around_those_of_the_collection(self) -> None:
        # V was 1 and is 1.5, range .2: target 2 -> (1.2 - 2)^2 = .64, target 1 -> .25.
        value = torch.tensor([1.0], dtype=torch.float64)
        learner = make_learner(PaperCritics(lambda texts: value, 1), value_clip_range=0.2)
        prepared = learner.prepare(learner.credit(rollout([2.0], [1.0]), 1.0), 1, stale=True)
        value += 0.5
        losses = [learner.value_loss([node.value], UpdateStats(1)) for node in prepared if node.value is not None]
        assert [float(loss) for loss in losses] == pytest.approx([0.64, 0.25])


class TestMetrics:
    def test_explained_variance_and_td_error(self) -> None:
        # Returns 0 and 4, values 1 and 3: the errors -1 and 1 have variance 1 of 4.
        values = {"10": 1.0, "11": 3.0}
        learner = make_learner(PaperCritics(lambda texts: [values[texts[0]]], 1))
        learner.prepare(learner.credit(rollout([0.0], [4.0]), 1.0), 1, stale=False)
        logged = learner.table.pop()
        assert logged["agent_0/explained_variance"] == pytest.approx(0.75)
        assert logged["agent_0/td_error"] == pytest.approx(1.0)

    def test_values_are_held_against_returns_not_rewards(self) -> None:
        # Rewards 1, 1 and 3, 3: returns 2, 1 and 6, 3, which the values are.
        values = {"10": 2.0, "20": 1.0, "11": 6.0, "21": 3.0}
        learner = make_learner(PaperCritics(lambda texts: [values[texts[0]]], 1))
        learner.prepare(learner.credit(rollout([1.0, 1.0], [3.0, 3.0]), 1.0), 2, stale=False)
        assert learner.table.pop()["agent_0/explained_variance"] == pytest.approx(1.0)

    def test_each_agent_has_its_own_critics_metrics(self) -> None:
        critics = PaperCritics(lambda texts: [0.25, 0.75], 2, num_critics=2)
        learner = make_learner(critics, 2)
        learner.prepare(learner.credit(rollout([1.0], num_agents=2), 1.0), 1, stale=False)
        logged = learner.table.pop()
        assert (logged["agent_0/td_error"], logged["agent_1/td_error"]) == (0.75, 0.25)

    def test_equal_returns_have_no_variance_to_explain(self) -> None:
        learner = make_learner(PaperCritics(by_turn(0.0), 1))
        learner.prepare(learner.credit(rollout([1.0], [1.0]), 1.0), 1, stale=False)
        assert "agent_0/explained_variance" not in learner.table.pop()


class TestActiveGroups:
    def test_critics_learn_from_every_node(self) -> None:
        # V = r: no advantage, hence no gradient for the agent.
        learner = make_learner(PaperCritics(by_turn(1.0), 1))
        prepared = learner.prepare(learner.credit(rollout([1.0]), 1.0), 1, stale=False)
        assert learner.active_groups(prepared) == {"critic"}
        assert learner.active_groups([]) == set()

    def test_and_agents_with_them_where_parameters_are_shared(self) -> None:
        learner = make_learner(PaperCritics(by_turn(1.0), 1, shared=True))
        prepared = learner.prepare(learner.credit(rollout([1.0]), 1.0), 1, stale=False)
        assert learner.active_groups(prepared) == {"critic", "agent_0"}
