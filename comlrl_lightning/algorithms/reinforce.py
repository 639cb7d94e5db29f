"""The critic-free family: one joint reward per joint completion, a baseline from the group, a policy per agent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from typing_extensions import override

from comlrl_lightning.algorithms.checks import check_choice, check_nodes, check_sampling
from comlrl_lightning.algorithms.cooperative import CooperativeModule
from comlrl_lightning.algorithms.learners import GroupRelativeLearner
from comlrl_lightning.functional import Baseline


class GroupRelativeModule(CooperativeModule):
    """What the critic-free algorithms share; they differ in the baseline.

    Args:
        joint_mode: ``"aligned"`` scores the k-th completions of all agents together (J=K); ``"cross"`` scores every
            combination (J=K^N) and gives each completion the mean over its partners. With the group mean as baseline
            that is the counterfactual baseline; the noise from pairwise interactions falls as 1/K, not 1/K^(N-1).
        advantage_normalization: Divide advantages by the standard deviation of their ``"group"``'s returns, by the root
            mean square over the buffer (``"batch"``), or not at all (False).
    """

    baseline: ClassVar[Baseline]
    fixed_settings = (*CooperativeModule.fixed_settings, "joint_mode", "advantage_normalization")

    def __init__(
        self,
        *args: Any,
        joint_mode: Literal["aligned", "cross"] = "aligned",
        advantage_normalization: Literal["group", "batch", False] = "group",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.save_hyperparameters({"joint_mode": joint_mode, "advantage_normalization": advantage_normalization})
        check_choice(("group", "batch", False), advantage_normalization=advantage_normalization)
        self.shape = replace(self.shape, joint_mode=joint_mode)
        self.advantage_normalization: Literal["group", "batch", False] = advantage_normalization
        self._check_group()
        check_sampling(type(self).__name__, self.sampling, refuse=self.baseline == "none")
        check_nodes(self.shape, self.num_agents, self.max_nodes)

    def _check_group(self) -> None:
        name, size = type(self).__name__, self.shape.num_generations
        if size == 1 and self.advantage_normalization == "batch":
            raise ValueError(
                f"{name}(num_generations=1, advantage_normalization='batch') has no spread inside groups to measure."
                " Use num_generations >= 2 or advantage_normalization=False."
            )
        if self.baseline == "none":
            if self.advantage_normalization == "group":
                raise ValueError(
                    f"{name}(advantage_normalization='group') has no baseline: a group of equal returns would be"
                    " divided by almost nothing. Use 'batch' or False."
                )
        elif size == 1:
            raise ValueError(
                f"{name}(num_generations=1) compares a completion with itself, so that every advantage is 0."
                " Use num_generations >= 2, or MAREINFORCE."
            )

    @override
    def build_learner(self) -> GroupRelativeLearner:
        return GroupRelativeLearner(
            self.team,
            self.policy,
            self.baseline,
            self.advantage_normalization,
            self.updates.micro_batch_tokens,
            self.training_metrics,
        )


class MAGRPO(GroupRelativeModule):
    """Multi-Agent GRPO: returns minus the mean of their group.

    The group-relative advantage of GRPO (https://arxiv.org/abs/2402.03300) for a team: the group holds joint
    completions, every agent is credited with the joint return.
    """

    baseline = "group_mean"


class MARLOO(GroupRelativeModule):
    """Multi-Agent RLOO: returns minus the mean of the other K-1 returns of their group.

    Without normalization this is K/(K-1) times MAGRPO, hence unbiased (https://arxiv.org/abs/2402.14740).
    """

    baseline = "leave_one_out"


class MAReMax(GroupRelativeModule):
    """Multi-Agent ReMax: returns minus the maximum of their group.

    It pushes away from all but the best of K completions, which works against what best-of-K needs: with a success of
    probability .05 and K=4 it expects .0068 where the true gradient is .0475. The original ReMax
    (https://arxiv.org/abs/2310.10505) subtracts the reward of the greedy completion instead.
    """

    baseline = "group_max"


class MAREINFORCE(GroupRelativeModule):
    """Multi-Agent REINFORCE: raw returns, no baseline.

    Args:
        advantage_normalization: False uses the returns as they are, ``"batch"`` divides them by one scale for the
            buffer. ``"group"`` is refused: it needs a baseline.
    """

    baseline = "none"

    def __init__(
        self, *args: Any, advantage_normalization: Literal["group", "batch", False] = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, advantage_normalization=advantage_normalization, **kwargs)
