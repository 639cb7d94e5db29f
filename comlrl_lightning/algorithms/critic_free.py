"""The critic-free family: one joint reward per joint completion, a baseline from the group, a policy per agent."""

import torch
from torch import Tensor
from typing_extensions import override

from comlrl_lightning.algorithms.methods import CriticFreeMethod, PolicyMethod
from comlrl_lightning.algorithms.policy_gradient import PolicyGradientModule
from comlrl_lightning.functional import group_max, group_mean, leave_one_out


class CriticFreeModule(CriticFreeMethod, PolicyGradientModule):
    """Policy gradients without critics; the algorithms of this family differ in `baseline`.

    A subclass with a method ``baseline(self, returns)``, from `[..., K]` returns to `[..., 1]` baselines, is a new
    algorithm.
    """

    @override
    def __post_init__(self) -> None:
        self.resolve_normalization()
        super().__post_init__()

    @property
    @override
    def method(self) -> PolicyMethod:
        return self

    @property
    @override
    def method_name(self) -> str:
        return type(self).__name__


class MAGRPO(CriticFreeModule):
    """Multi-Agent GRPO: returns minus the mean of their group.

    From "LLM Collaboration with Multi-Agent Reinforcement Learning" (Liu, Liang, Lyu, Amato, 2025,
    https://arxiv.org/abs/2508.04652): the group-relative advantage of GRPO (https://arxiv.org/abs/2402.03300) for a
    team, whose group holds joint completions and where every agent is credited with the joint return.
    """

    @override
    def baseline(self, returns: Tensor) -> Tensor:
        return group_mean(returns)


class MARLOO(CriticFreeModule):
    """Multi-Agent RLOO: returns minus the mean of the other K-1 returns of their group.

    Without normalization (``advantage_normalization=False``) this is K/(K-1) times MAGRPO, hence unbiased
    (https://arxiv.org/abs/2402.14740). The default divides by the standard deviation of the group, which weighs items
    with little spread more (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    """

    @override
    def baseline(self, returns: Tensor) -> Tensor:
        return leave_one_out(returns)

    @override
    def kl_baseline(self, log_ratios: Tensor) -> Tensor:
        return leave_one_out(log_ratios)


class MAReMax(CriticFreeModule):
    """Multi-Agent ReMax: returns minus the maximum of their group.

    It pushes away from all but the best of K completions, which works against what best-of-K needs: with a success of
    probability .05 and K=4 it expects .0068 where the true gradient is .0475. The original ReMax
    (https://arxiv.org/abs/2310.10505) subtracts the reward of the greedy completion instead.
    """

    @override
    def baseline(self, returns: Tensor) -> Tensor:
        return group_max(returns)


class MAREINFORCE(CriticFreeModule):
    """Multi-Agent REINFORCE: raw returns, no baseline.

    ``advantage_normalization="group"`` is refused, as it needs a baseline.
    """

    has_baseline = False

    @override
    def baseline(self, returns: Tensor) -> Tensor:
        return torch.zeros_like(returns)

    @override
    def kl_baseline(self, log_ratios: Tensor) -> Tensor:
        return torch.zeros_like(log_ratios)
