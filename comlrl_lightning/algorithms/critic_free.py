"""The critic-free family: one joint reward per joint completion, a baseline from the group, a policy per agent."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from comlrl_lightning.algorithms.methods import CriticFree, CriticFreeName
from comlrl_lightning.algorithms.module import CooperativeModule
from comlrl_lightning.utilities.checks import check_choice


class GroupRelativeModule(CooperativeModule):
    """What the critic-free algorithms share; they differ in the baseline.

    Args:
        joint_mode: ``"aligned"`` scores the k-th completions of all agents together (J=K); ``"cross"`` scores every
            combination (J=K^N) and gives each completion the mean over its partners. With the group mean as baseline
            that is the counterfactual baseline; the noise from pairwise interactions falls as 1/K, not 1/K^(N-1).
        advantage_normalization: Divide advantages by the standard deviation of their ``"group"``'s returns, by the root
            mean square over the buffer (``"batch"``), or not at all (False).
    """

    algorithm: ClassVar[CriticFreeName]
    fixed_settings = (*CooperativeModule.fixed_settings, "joint_mode", "advantage_normalization")

    def __init__(
        self,
        *args: Any,
        joint_mode: Literal["aligned", "cross"] = "aligned",
        advantage_normalization: Literal["group", "batch", False] = "group",
        **kwargs: Any,
    ) -> None:
        check_choice(("group", "batch", False), advantage_normalization=advantage_normalization)
        super().__init__(*args, **kwargs)
        self.save_hyperparameters({"joint_mode": joint_mode, "advantage_normalization": advantage_normalization})
        self._set_up_method(CriticFree(self.algorithm, joint_mode, advantage_normalization))


class MAGRPO(GroupRelativeModule):
    """Multi-Agent GRPO: returns minus the mean of their group.

    From "LLM Collaboration with Multi-Agent Reinforcement Learning" (Liu, Liang, Lyu, Amato, 2025,
    https://arxiv.org/abs/2508.04652): the group-relative advantage of GRPO (https://arxiv.org/abs/2402.03300) for a
    team, whose group holds joint completions and where every agent is credited with the joint return.
    """

    algorithm = "MAGRPO"


class MARLOO(GroupRelativeModule):
    """Multi-Agent RLOO: returns minus the mean of the other K-1 returns of their group.

    Without normalization this is K/(K-1) times MAGRPO, hence unbiased (https://arxiv.org/abs/2402.14740).
    """

    algorithm = "MARLOO"


class MAReMax(GroupRelativeModule):
    """Multi-Agent ReMax: returns minus the maximum of their group.

    It pushes away from all but the best of K completions, which works against what best-of-K needs: with a success of
    probability .05 and K=4 it expects .0068 where the true gradient is .0475. The original ReMax
    (https://arxiv.org/abs/2310.10505) subtracts the reward of the greedy completion instead.
    """

    algorithm = "MAReMax"


class MAREINFORCE(GroupRelativeModule):
    """Multi-Agent REINFORCE: raw returns, no baseline.

    Args:
        advantage_normalization: False uses the returns as they are, ``"batch"`` divides them by one scale for the
            buffer. ``"group"`` is refused: it needs a baseline.
    """

    algorithm = "MAREINFORCE"

    def __init__(
        self, *args: Any, advantage_normalization: Literal["group", "batch", False] = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, advantage_normalization=advantage_normalization, **kwargs)
