"""Returns, node weights and what an agent's completion earned."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from comlrl_lightning.functional import agent_returns, node_weights, policy_loss, subtract_baseline, tree_returns


def test_a_leaf_returns_its_rewards() -> None:
    rewards = torch.tensor([1.0, -2.0, 3.5])
    (returns,) = tree_returns([rewards], [None], 0.9)
    torch.testing.assert_close(returns, torch.tensor([1.0, -2.0, 3.5]))


def test_the_child_adds_its_discounted_mean_to_the_joint_completion_it_follows() -> None:
    # Turn 3 below the second joint completion of turn 2: mean(4, 8) = 6, so R = 2 + .5 * 6 = 5 there.
    # Turn 2 below the first of turn 1: mean(1, 5) = 3, so R = 10 + .5 * 3 = 11.5; the other one ended: R = 20.
    rewards = [torch.tensor([10.0, 20.0]), torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])]
    returns = tree_returns(rewards, [None, (0, 0), (1, 1)], 0.5)
    torch.testing.assert_close(returns[0], torch.tensor([11.5, 20.0]))
    torch.testing.assert_close(returns[1], torch.tensor([1.0, 5.0]))
    torch.testing.assert_close(returns[2], torch.tensor([4.0, 8.0]))


def test_two_trees_do_not_mix() -> None:
    # Breadth first: both roots, then the children, here in the other order. Discount .1 of means 3 and 7.
    rewards = [torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 4.0]), torch.tensor([6.0, 8.0])]
    returns = tree_returns(rewards, [None, None, (1, 1), (0, 0)], 0.1)
    torch.testing.assert_close(returns[0], torch.tensor([0.7, 0.0]))
    torch.testing.assert_close(returns[1], torch.tensor([0.0, 0.3]))


def test_the_rewards_are_left_as_they_were() -> None:
    rewards = [torch.tensor([1.0, 1.0]), torch.tensor([5.0, 5.0])]
    tree_returns(rewards, [None, (0, 0)], 1.0)
    torch.testing.assert_close(rewards[0], torch.tensor([1.0, 1.0]))


def test_early_termination_punishes_the_better_branch() -> None:
    # Parent rewards (.5, .5). A scores 1.0 and stops there: .5 + 1.0 = 1.5. B scores .6 and goes on to .6: 1.7.
    rewards = [torch.tensor([0.5, 0.5]), torch.tensor([1.0]), torch.tensor([0.6]), torch.tensor([0.6])]
    returns = tree_returns(rewards, [None, (0, 0), (0, 1), (2, 0)], 1.0)
    torch.testing.assert_close(returns[0], torch.tensor([1.5, 1.7]))


def test_the_weight_is_the_product_of_one_over_the_ancestors_joint_completions() -> None:
    # Root of 4; its children have 2 and 3 joint completions; theirs weigh 1/4 * 1/2 and 1/4 * 1/3, whatever the
    # number of their own joint completions (5 and 7) and however many siblings are alive.
    weights = node_weights([None, (0, 0), (0, 2), (1, 1), (2, 0)], [4, 2, 3, 5, 7])
    torch.testing.assert_close(weights, torch.tensor([1, 1 / 4, 1 / 4, 1 / 8, 1 / 12], dtype=torch.float64))


def test_every_root_weighs_one() -> None:
    torch.testing.assert_close(node_weights([None, None], [4, 2]), torch.tensor([1.0, 1.0], dtype=torch.float64))


def test_a_tree_loss_weighs_the_turns_alike() -> None:
    # Losses 3; 1, 2 (K=2, T=2): (1 * 3 + .5 * 1 + .5 * 2) / (1 + .5 + .5) = 2.25; the plain mean would be 2.
    weights = node_weights([None, (0, 0), (0, 1)], [2, 2, 2])
    losses = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close((weights * losses).sum() / weights.sum(), torch.tensor(2.25, dtype=torch.float64))


def test_a_complete_tree_gives_each_turn_the_same_share() -> None:
    # K=4, T=3: 1 node, 4 of 1/4, 16 of 1/16. Unweighted, turn 3 would be 16 of 21 nodes: 76%.
    parents = [None, *[(0, k) for k in range(4)], *[(1 + n, k) for n in range(4) for k in range(4)]]
    weights = node_weights(parents, [4] * 21)
    torch.testing.assert_close(weights[1:5].sum().item(), 1.0)
    torch.testing.assert_close(weights[5:].sum().item(), 1.0)


def test_two_ranks_add_sums_before_they_divide() -> None:
    # One node each, gradients 1 and 3, whatever the number of tokens: (1 + 3) / (1 + 1) = 2.
    sums = [(node_weights([None], [2]) * gradient).sum() for gradient in (1.0, 3.0)]
    total = sum(node_weights([None], [2]).sum() for _ in range(2))
    torch.testing.assert_close(sum(sums) / total, torch.tensor(2.0, dtype=torch.float64))


def two_turn_gradients() -> tuple[float, float, float]:
    """Exact gradients by the mean over nodes, the weighted mean and the weighted sum.

    K=2, T=2, one Bernoulli parameter p=.5 for all actions, r1 = a1, r2 = -.6 a2, mean baseline: all 2^6 outcomes.
    """
    parents = [None, (0, 0), (0, 1)]
    weights, gradients = node_weights(parents, [2, 2, 2]), torch.zeros(3, dtype=torch.float64)
    logit = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for outcome in product((0.0, 1.0), repeat=6):
        actions = torch.tensor(outcome, dtype=torch.float64).reshape(3, 2)
        returns = tree_returns([actions[0], -0.6 * actions[1], -0.6 * actions[2]], parents, 1.0)
        for node in range(3):
            log_probs = torch.where(actions[node] == 1, logit.sigmoid().log(), (-logit).sigmoid().log())
            advantages = subtract_baseline(returns[node], "group_mean")
            loss = policy_loss(log_probs.unsqueeze(-1), advantages, torch.ones(2, 1, dtype=torch.bool)).loss.mean()
            gradients[node] -= torch.autograd.grad(loss, logit)[0] / 2**6
    total = (weights * gradients).sum()
    return gradients.mean().item(), (total / weights.sum()).item(), total.item()


def test_without_weights_the_gradient_changes_its_sign() -> None:
    # Turn 1: (K-1)/K * p(1-p) * 1 = .125. Each node of turn 2: .5 * .25 * -.6 = -.075.
    # Nodes: (.125 - .15) / 3 = -.00833. Weights: .125 - .5 * .075 - .5 * .075 = .05, divided by 2 it is .025.
    # The true gradient (.4 p(1-p) = .1) is twice the sum: the mean baseline costs (K-1)/K = 1/2.
    node_mean, weighted_mean, weighted_sum = two_turn_gradients()
    assert node_mean == pytest.approx(-0.025 / 3)
    assert weighted_mean == pytest.approx(0.025)
    assert weighted_sum == pytest.approx(0.05)


def joint_of(num_agents: int, num_generations: int) -> Tensor:
    return torch.tensor(list(product(range(num_generations), repeat=num_agents)))


def test_cross_gives_an_agent_the_mean_over_the_joint_completions_that_hold_its_own() -> None:
    # r = [[0, 2], [1, 5]], agent 0 down: rows (1, 3); agent 1 across: columns (.5, 3.5).
    returns = agent_returns(torch.tensor([0.0, 2.0, 1.0, 5.0]), joint_of(2, 2), 2)
    torch.testing.assert_close(returns, torch.tensor([[1.0, 3.0], [0.5, 3.5]]))


def test_cross_of_three_agents_keeps_the_scale_of_one_reward() -> None:
    # r = 4 a0 + 2 a1 + a2 over {0, 1}^3, the means of the others' parts are 1/2 each.
    # Agent 0: 1.5, 5.5; agent 1: 2.5, 4.5; agent 2: 3, 4.
    returns = agent_returns(torch.arange(8.0), joint_of(3, 2), 2)
    torch.testing.assert_close(returns, torch.tensor([[1.5, 5.5], [2.5, 4.5], [3.0, 4.0]]))


def test_aligned_gives_every_agent_the_joint_returns() -> None:
    joint = torch.tensor([[0, 0], [1, 1], [2, 2]])
    returns = agent_returns(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), joint, 3)
    torch.testing.assert_close(returns, torch.tensor([[1.0, 2.0, 4.0]] * 2, dtype=torch.float64))


def test_pairs_in_any_order() -> None:
    # Agent 0's completion 1 is with agent 1's completion 0, and the other way round.
    returns = agent_returns(torch.tensor([3.0, 7.0]), torch.tensor([[1, 0], [0, 1]]), 2)
    torch.testing.assert_close(returns, torch.tensor([[7.0, 3.0], [3.0, 7.0]]))


def test_equal_joint_returns_leave_equal_agent_returns() -> None:
    # 7 x .35 in float32 does not add up to 2.45 exactly; it must still be the same for each completion.
    returns = agent_returns(torch.full((7**3,), 0.35), joint_of(3, 7), 7)
    assert returns.eq(returns[0, 0]).all()
