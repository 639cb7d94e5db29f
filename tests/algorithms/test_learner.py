"""Credit and loss of buffers on paper: a team whose log-probabilities are numbers that a test hands over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from comlrl_lightning.agents.batches import completion_batches, micro_batches
from comlrl_lightning.agents.team import AgentTeam, TokenScores
from comlrl_lightning.functional import Baseline, Normalization
from comlrl_lightning.learning.minibatches import UpdateStats
from comlrl_lightning.learning.policy import GroupRelativeLearner
from comlrl_lightning.learning.settings import PolicySettings
from comlrl_lightning.metrics import MetricTable, training_keys
from comlrl_lightning.rollouts.credit import CreditedNode, assign_credit
from comlrl_lightning.types import Completion, Node, Rollouts

ScoreFunction = Callable[[str], Tensor]


class PaperTeam:
    """Scores every one-token completion by a function of its text; remembers what it was asked."""

    device = torch.device("cpu")
    concurrent = False
    reads_prompts_once = False

    def __init__(self, num_agents: int, policy: ScoreFunction, reference: ScoreFunction | None = None) -> None:
        self.num_agents = num_agents
        self.policy = policy
        self.reference = reference or policy
        self.asked: list[list[str]] = []

    def speaker(self, agent: int) -> PaperTeam:
        """One for all."""
        return self

    def micro_batches(self, completions: Sequence[Completion], token_budget: int) -> list[list[list[int]]]:
        """Micro-batches of one model, as `AgentTeam` cuts them."""
        batches = completion_batches(completions, token_budget, reads_prompts_once=self.reads_prompts_once)
        return [[batch] for batch in batches]

    def log_probs(
        self, completions: Sequence[Completion], *, temperature: float, reference: bool = False
    ) -> TokenScores:
        self.asked.append([completion.text for completion in completions])
        score = self.reference if reference else self.policy
        log_probs = torch.stack([score(completion.text) for completion in completions]).unsqueeze(1)
        return TokenScores(log_probs, torch.zeros_like(log_probs), torch.ones_like(log_probs, dtype=torch.bool))


def completion(agent: int, text: str) -> Completion:
    return Completion(agent, "p", (1,), (2,), (-1.0,), text, truncated=False)


def node(texts: Sequence[Sequence[str]], rewards: Sequence[float], path: tuple[int, ...] = (), task: int = 0) -> Node:
    """An aligned node of completions ``texts[agent][k]``; below the first turn its parent is the first node."""
    groups = tuple(tuple(completion(agent, text) for text in group) for agent, group in enumerate(texts))
    joint = tuple((k,) * len(texts) for k in range(len(rewards)))
    parent = (0, path[-1]) if path else None
    return Node(task, len(path) + 1, path, parent, ("p",) * len(texts), groups, joint, tuple(rewards))


def credited(*nodes: Node, discount: float = 1.0) -> list[CreditedNode]:
    return assign_credit(Rollouts(({},), (0,), nodes), discount)


def make_learner(
    team: PaperTeam, baseline: Baseline, normalization: Normalization = False, **policy: Any
) -> GroupRelativeLearner:
    settings = {
        "temperature": 1.0,
        "reference_kl_coef": 0.0,
        "clip_epsilon": None,
        "clip_epsilon_high": None,
        "importance_level": "token",
        "entropy_coef": 0.0,
        "loss_aggregation": "sum",
        "max_new_tokens": 1,
        "dual_clip": None,
    }
    table = MetricTable(training_keys(2, team.num_agents, with_kl=True))
    kept = PolicySettings(**{**settings, **policy})
    return GroupRelativeLearner(cast("AgentTeam", team), kept, baseline, normalization, 4096, table)


def loss(learner: GroupRelativeLearner, buffer: Sequence[CreditedNode], num_agents: int = 1) -> Tensor:
    """Loss of a buffer that is used in one optimizer step."""
    prepared = learner.prepare(buffer, max(entry.node.turn for entry in buffer), stale=False)
    rows = [row for entry in prepared for row in entry.rows]
    return learner.loss(rows, UpdateStats(num_agents)) / len(prepared)


def advantages(learner: GroupRelativeLearner, buffer: Sequence[CreditedNode]) -> list[list[float]]:
    """Per node the advantages of the rows that are trained."""
    return [[row.advantage for row in entry.rows] for entry in learner.prepare(buffer, 2, stale=False)]


def minus_one(text: str) -> Tensor:
    return torch.tensor(-1.0, dtype=torch.float64)


class TestNodeWeights:
    def test_the_loss_of_a_tree_weighs_its_turns_alike(self) -> None:
        # K=2, T=2, log pi = -1, no baseline, discount 0: a node's loss is its mean reward, 3 and below it 1 and 2.
        # Weights 1, .5, .5: (3 + .5 + 1) / 2 = 2.25; without weights it would be 2.
        nodes = (
            node([["a", "b"]], (3.0, 3.0)),
            node([["c", "d"]], (1.0, 1.0), path=(0,)),
            node([["e", "f"]], (2.0, 2.0), path=(1,)),
        )
        learner = make_learner(PaperTeam(1, minus_one), "none")
        torch.testing.assert_close(loss(learner, credited(*nodes, discount=0.0)), torch.tensor(2.25).double())

    def test_the_gradient_is_that_of_the_expected_return(self) -> None:
        # One Bernoulli parameter for both turns, p = .5, r1 = a1, r2 = -.6 a2. d E[R] / d logit = (1 - .6) / 4 = .1;
        # the group mean takes (K-1)/K = half of it, and the tree's weights add up to 2: .1 / 2 / 2 = .025. Without
        # weights it would be -.00833, of the wrong sign. All 2^6 trees have the same probability.
        logit = torch.zeros((), dtype=torch.float64, requires_grad=True)
        log_probs = {"1": torch.nn.functional.logsigmoid(logit), "0": torch.nn.functional.logsigmoid(-logit)}
        learner = make_learner(PaperTeam(1, log_probs.__getitem__), "group_mean")
        total = torch.zeros((), dtype=torch.float64)
        for choices in product("01", repeat=6):
            pairs = [choices[0:2], choices[2:4], choices[4:6]]
            nodes = [node([pairs[0]], [float(choice) for choice in pairs[0]])] + [
                node([pairs[1 + k]], [-0.6 * float(choice) for choice in pairs[1 + k]], path=(k,)) for k in (0, 1)
            ]
            prepared = learner.prepare(credited(*nodes), 2, stale=False)
            rows = [row for entry in prepared for row in entry.rows]
            if rows:
                total = total + learner.loss(rows, UpdateStats(1)) / 3 / 64
        (gradient,) = torch.autograd.grad(-total, logit)
        torch.testing.assert_close(gradient, torch.tensor(0.025).double())


class TestSilentGroups:
    # log pi = -1, raw returns: a node's loss is its mean reward.
    buffer = tuple(credited(node([["a", "b"]], (2.0, 2.0)), node([["c", "d"]], (0.0, 0.0), task=1)))

    def test_they_stay_in_the_denominator(self) -> None:
        # Losses 2 and 0 give 1.
        learner = make_learner(PaperTeam(1, minus_one), "none")
        torch.testing.assert_close(loss(learner, self.buffer), torch.tensor(1.0).double())

    def test_they_are_not_scored(self) -> None:
        team = PaperTeam(1, minus_one)
        loss(make_learner(team, "none"), self.buffer)
        assert team.asked == [["a", "b"]]

    def test_an_entropy_bonus_wakes_them(self) -> None:
        team = PaperTeam(1, minus_one)
        loss(make_learner(team, "none", entropy_coef=0.1), self.buffer)
        assert team.asked == [["a", "b", "c", "d"]]

    def test_a_penalty_wakes_them(self) -> None:
        # Equal rewards, but kappa = log pi - log pi_ref differs: 1 for "a", 0 for "b"; .1 * (kappa - .5) = -+.05.
        reference = {"a": torch.tensor(-2.0), "b": torch.tensor(-1.0)}
        team = PaperTeam(1, lambda text: torch.tensor(-1.0), reference.__getitem__)
        learner = make_learner(team, "group_mean", reference_kl_coef=0.1)
        (values,) = advantages(learner, credited(node([["a", "b"]], (2.0, 2.0))))
        assert values == pytest.approx([-0.05, 0.05])

    def test_the_share_of_groups_without_advantage_is_logged(self) -> None:
        learner = make_learner(PaperTeam(1, minus_one), "none")
        learner.prepare(self.buffer, 2, stale=False)
        assert learner.table.pop()["agent_0/zero_advantage_share"] == 0.5


class TestAdvantages:
    def test_batch_normalization_leaves_noise_small(self) -> None:
        # Groups (0, 0, 0, 1) and (.5, .5, .5, .501): root mean square .30619, last entries 2.449 and .00245.
        texts = [["a", "b", "c", "d"]]
        buffer = credited(node(texts, (0.0, 0.0, 0.0, 1.0)), node(texts, (0.5, 0.5, 0.5, 0.501), task=1))
        first, second = advantages(make_learner(PaperTeam(1, minus_one), "group_mean", "batch"), buffer)
        assert first[3] == pytest.approx(0.75 / (0.30619 + 1e-4), rel=1e-4)
        assert second[3] == pytest.approx(0.00245, rel=1e-3)

    def test_batch_normalization_takes_agents_and_turns_apart(self) -> None:
        # One group per agent and turn: the scale is its own standard deviation, so every group comes out as -1, 1.
        nodes = (
            node([["a", "b"], ["c", "d"]], (0.0, 2.0)),
            node([["e", "f"], ["g", "h"]], (0.0, 200.0), path=(0,)),
        )
        values = advantages(
            make_learner(PaperTeam(2, minus_one), "group_mean", "batch"), credited(*nodes, discount=0.0)
        )
        assert values[0] == pytest.approx([-1, 1, -1, 1], rel=1e-3)
        assert values[1] == pytest.approx([-1, 1, -1, 1], rel=1e-3)

    def test_the_penalty_comes_after_normalization_and_is_centered(self) -> None:
        # R = (1, 1, 1, 1), kappa = (.1, .2, .3, .4), coefficient .01 -> (.0015, .0005, -.0005, -.0015).
        kappa = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}
        team = PaperTeam(1, minus_one, lambda text: torch.tensor(-1.0 - kappa[text]).double())
        learner = make_learner(team, "group_mean", "group", reference_kl_coef=0.01)
        (values,) = advantages(learner, credited(node([list(kappa)], (1.0,) * 4)))
        assert values == pytest.approx([0.0015, 0.0005, -0.0005, -0.0015], abs=1e-9)

    def test_an_agents_penalty_leaves_the_others_alone(self) -> None:
        def run(size: float) -> list[float]:
            drift = {"a": 0.1 * size, "b": 0.4 * size, "c": 0.2, "d": 0.3}
            team = PaperTeam(2, minus_one, lambda text: torch.tensor(-1.0 - drift[text]).double())
            learner = make_learner(team, "group_mean", "group", reference_kl_coef=0.1)
            (values,) = advantages(learner, credited(node([["a", "b"], ["c", "d"]], (0.0, 1.0))))
            return values

        assert run(1.0)[2:] == run(100.0)[2:]
        assert run(1.0)[:2] != run(100.0)[:2]

    def test_the_logged_penalty_and_estimate(self) -> None:
        # kappa = .1 and .3: mean .2 times the coefficient .5; k3 = exp(-kappa) - 1 + kappa: .004837 and .040818.
        drift = {"a": 0.1, "b": 0.3}
        team = PaperTeam(1, minus_one, lambda text: torch.tensor(-1.0 - drift[text]).double())
        learner = make_learner(team, "group_mean", reference_kl_coef=0.5)
        learner.prepare(credited(node([["a", "b"]], (0.0, 1.0))), 2, stale=False)
        logged = learner.table.pop()
        assert logged["turn_1/reference_kl_penalty_mean"] == pytest.approx(0.1)
        assert logged["turn_1/reference_kl_mean"] == pytest.approx((0.004837 + 0.040818) / 2, abs=1e-6)

    @pytest.mark.parametrize(("temperature", "kappa"), [(0.5, 0.2), (1.0, 0.1), (0.0, 0.1)])
    def test_an_evaluation_has_the_distance_at_its_own_temperature(self, temperature: float, kappa: float) -> None:
        # Log-probs -1 / T and -1.1 / T: kappa = .1 / T, k3 = exp(-kappa) - 1 + kappa. Greedy answers are scored at 1.
        class WarmTeam(PaperTeam):
            def log_probs(
                self, completions: Sequence[Completion], *, temperature: float, reference: bool = False
            ) -> TokenScores:
                scores = super().log_probs(completions, temperature=temperature, reference=reference)
                return replace(scores, log_probs=scores.log_probs / temperature)

        team = WarmTeam(1, minus_one, lambda text: torch.tensor(-1.1).double())
        learner = make_learner(team, "group_mean", temperature=1.3, reference_kl_coef=0.5)
        learner.record_kl(learner.table, [node([["a"]], (0.0,))], temperature)
        logged = learner.table.pop()
        assert logged["turn_1/reference_kl_mean"] == pytest.approx(math.exp(-kappa) - 1 + kappa)
        assert logged["turn_1/reference_kl_penalty_mean"] == pytest.approx(0.5 * kappa)


class TestStaleness:
    buffer = tuple(credited(node([["a", "b"]], (0.0, 1.0))))

    def test_one_optimizer_step_needs_no_old_log_probs(self) -> None:
        team = PaperTeam(1, minus_one)
        (entry,) = make_learner(team, "group_mean").prepare(self.buffer, 1, stale=False)
        assert team.asked == []
        assert all(row.old_log_probs is None for row in entry.rows)

    def test_more_than_one_scores_the_whole_buffer_first(self) -> None:
        team = PaperTeam(1, minus_one)
        (entry,) = make_learner(team, "group_mean").prepare(self.buffer, 1, stale=True)
        assert team.asked == [["a", "b"]]
        assert [row.old_log_probs.tolist() for row in entry.rows if row.old_log_probs is not None] == [[-1.0]] * 2

    @pytest.mark.parametrize("drift", [-110.0, -60.0, 60.0, 110.0])
    def test_a_policy_that_ran_away_is_still_measured(self, drift: float) -> None:
        team = PaperTeam(1, minus_one)
        learner = make_learner(team, "group_mean", clip_epsilon=0.2)
        (entry,) = learner.prepare(self.buffer, 1, stale=True)
        team.policy = lambda text: torch.tensor(drift - 1.0).double()
        learner.loss(entry.rows, stats := UpdateStats(1))
        stats.record(learner.table, 1)
        assert learner.table.pop()["agent_0/effective_sample_size"] == pytest.approx(1.0)

    def test_the_clip_stops_a_ratio_that_moved(self) -> None:
        # A = (-.5, .5), both new log-probs .3 above the old: ratio 1.349859, clipped at 1.2 where A > 0.
        # Loss of the node: -(-.5 * 1.349859 + .5 * 1.2) / 2 = .037465.
        team = PaperTeam(1, minus_one)
        learner = make_learner(team, "group_mean", clip_epsilon=0.2)
        (entry,) = learner.prepare(self.buffer, 1, stale=True)
        team.policy = lambda text: torch.tensor(-0.7).double()
        stats = UpdateStats(1)
        value = learner.loss(entry.rows, stats)
        torch.testing.assert_close(value, torch.tensor(0.0374647).double())
        stats.record(learner.table, 1)
        logged = learner.table.pop()
        assert logged["agent_0/clip_share"] == 0.5
        assert logged["agent_0/loss"] == pytest.approx(0.0374647, abs=1e-6)
        # The sampler agreed with the policy before the update, whatever has become of that since.
        assert logged["agent_0/sampler_gap"] == pytest.approx(0.0)
        assert logged["agent_0/effective_sample_size"] == pytest.approx(1.0)

    def test_the_dual_clip_bounds_what_became_likelier(self) -> None:
        # A = (-.5, .5), both ratios e = 2.718282. A < 0: bounded at 2, no gradient; A > 0: at 1.2.
        # Loss of the node: -(-.5 * 2 + .5 * 1.2) / 2 = .2.
        team = PaperTeam(1, minus_one)
        learner = make_learner(team, "group_mean", clip_epsilon=0.2, dual_clip=2.0)
        (entry,) = learner.prepare(self.buffer, 1, stale=True)
        team.policy = lambda text: torch.tensor(0.0).double()
        torch.testing.assert_close(learner.loss(entry.rows, stats := UpdateStats(1)), torch.tensor(0.2).double())
        stats.record(learner.table, 1)
        assert learner.table.pop()["agent_0/clip_share"] == 1.0


class TestCompletionBatches:
    ROWS = tuple(
        Completion(0, "", (prompt,) * 20, tuple(range(length)), (), "", False)
        for length in (2, 4, 6)
        for prompt in (7, 8)
    )

    def test_answers_to_a_prompt_stand_together(self) -> None:
        # By length two rows of different prompts take 2 x 22 = 44 tokens; by prompt three take 20 + 3 x 6 = 38.
        assert completion_batches(self.ROWS, 45, reads_prompts_once=True) == [[0, 2, 4], [1, 3, 5]]

    def test_not_where_the_model_reads_each_prompt_for_each_answer(self) -> None:
        # 2 x 22 = 44, but 2 x 24 = 48 > 45.
        assert completion_batches(self.ROWS, 45, reads_prompts_once=False) == [[0, 1], [2], [3], [4], [5]]

    def test_by_length_if_no_prompt_is_shared(self) -> None:
        rows = self.ROWS[:2] + self.ROWS[5:]
        assert completion_batches(rows[1:], 60, reads_prompts_once=True) == [[0, 1]]
        assert completion_batches([], 60, reads_prompts_once=True) == []


class Counted(tuple[int, ...]):
    """Tokens of a prompt that count how often something looks at all of them or at their number."""

    looks = 0

    def __hash__(self) -> int:
        type(self).looks += 1
        return super().__hash__()

    def __len__(self) -> int:
        type(self).looks += 1
        return super().__len__()


@pytest.mark.parametrize("num_rows", [50, 500])
def test_the_cut_takes_a_fixed_number_of_looks_per_row(num_rows: int) -> None:
    # All rows fit into one batch: measuring it anew for each of them would take num_rows / 2 looks per row.
    rows = [Completion(0, "", Counted(range(9)), (1,) * (1 + row % 3), (), "", False) for row in range(num_rows)]
    Counted.looks = 0
    (batch,) = completion_batches(rows, 10**6, reads_prompts_once=True)
    assert sorted(batch) == list(range(num_rows))
    assert Counted.looks <= 10 * num_rows


class TestMicroBatches:
    def test_rows_of_like_length_within_the_budget(self) -> None:
        # Sorted 3, 4, 5, 9: two rows of 4 make 8, with 5 three of 5 would make 15 > 10; 5 and 9 would make 18.
        assert micro_batches([9, 4, 3, 5], 10) == [[2, 1], [3], [0]]

    def test_batches_are_even(self) -> None:
        # 22 tokens hold four rows of 5, which would leave 4, 4 and 1; three batches can as well have three each.
        assert micro_batches([5] * 9, 22) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]

    def test_rows_of_a_kind_stand_together(self) -> None:
        assert micro_batches([5, 5, 4, 5, 5], 10, kinds=[1, 0, 1, 1, 0]) == [[2, 1], [4, 0], [3]]

    def test_a_row_above_the_budget_goes_alone(self) -> None:
        assert micro_batches([50, 50], 10) == [[0], [1]]

    def test_no_rows(self) -> None:
        assert micro_batches([], 10) == []
