"""Multi-agent RLHF: a reward model is fitted to pairs, then the policies learn from its scores."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.nn import Parameter
from typing_extensions import override

from comlrl_lightning.algorithms.methods import (
    ActorCritic,
    ActorCriticName,
    CriticFree,
    CriticFreeName,
    PolicyMethod,
    policy_method,
)
from comlrl_lightning.algorithms.module import TRAIN
from comlrl_lightning.algorithms.policy_gradient import BufferedPolicyModule
from comlrl_lightning.algorithms.preference import PreferenceModule
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.environment.functions import TaskFunctions
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.learning.reward_model import LearnedReward, Moments, RewardLearner, build_reward_model
from comlrl_lightning.metrics import LEARNED, preference_keys
from comlrl_lightning.preferences.rounds import Phase, Schedule
from comlrl_lightning.utilities.checks import check_choice, check_kind

PolicyName = CriticFreeName | ActorCriticName
"""The algorithms that learn from rewards."""


class MARLHF(PreferenceModule, BufferedPolicyModule):
    """Multi-Agent RLHF: fits a joint reward model to the pairs, then learns from its scores by policy gradients.

    A round collects, then fits the reward model for ``reward_model.num_epochs`` epochs (each one pass over the pairs),
    then learns for `learning_epochs` epochs on the task items, as the algorithm of `policy` does on a reward function,
    with the settings of rollouts, buffer and loss given here. Its rewards are the reward model's scores, which reward
    metrics show as ``learned/...``; evaluations and candidates are scored by the task.
    """

    reward_model: JointRewardModel = JointRewardModel()
    """The reward model and how it is fitted."""
    policy: PolicyName | CriticFree | ActorCritic = "MAGRPO"
    """The algorithm that learns from the scores, by name or with settings of its own."""
    preference_scoring: Literal["task", "reward_model"] = "task"
    """What ranks the candidates: the ``"task"``'s reward, or, from the second round on, the ``"reward_model"`` of the
    round before."""

    @override
    def check_settings(self) -> None:
        check_kind(JointRewardModel, reward_model=self.reward_model)
        self._method = policy_method(self.policy)
        super().check_settings()
        check_choice(("task", "reward_model"), preference_scoring=self.preference_scoring)
        if self._method.method_name == "MAREINFORCE" and not self.reward_model.standardize:
            raise ValueError(
                "policy='MAREINFORCE' has no baseline, and a reward model's scores no zero: with"
                " reward_model.standardize=False all answers might be pushed up. Use standardize=True."
            )

    @property
    @override
    def method(self) -> PolicyMethod:
        return self._method

    @override
    def make_schedule(self) -> Schedule:
        return Schedule(self.reward_model.num_epochs, self.learning_epochs)

    @override
    def training_metric_keys(self) -> list[str]:
        return [*super().training_metric_keys(), *preference_keys(self.team_size, direct=False)]

    @override
    def build_learners(self) -> None:
        super().build_learners()
        self.reward_network = build_reward_model(self.reward_model, self.team, self.num_agents)
        self.reward_learner = RewardLearner(
            self.reward_network,
            self.reward_model,
            self.micro_batch_tokens,
            self.training_metrics,
            self.functions.joint_format,
            self.num_agents,
        )

    @override
    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        return {**super().parameter_groups(), **self.reward_learner.parameter_groups()}

    @override
    def initial_learning_rates(self) -> list[float]:
        return [*super().initial_learning_rates(), self.reward_model.initial_learning_rate]

    @override
    def learn(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        if phase.kind == "reward":
            self._fit_reward_model(batch, phase, is_last)
        elif self.rounds.pairs and self.rounds.is_fitted:
            self.rollouts = self.collect(batch, TRAIN, self.sampling, self.shape, self._learned_functions())
            self.learn_from(self.rollouts, is_last)
        else:
            self.idle_step()

    @property
    @override
    def reward_prefix(self) -> str:
        return LEARNED

    def _fit_reward_model(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        """One training step of an epoch that fits the reward model."""
        learner = self.reward_learner
        fitted, held_out = learner.split(self.rounds.pairs, self.seed)
        if not fitted:
            self.idle_step()
            return
        if batch.start == phase.index == 0:
            optimizer = self.optimizers()
            assert isinstance(optimizer, LightningOptimizer)
            learner.reset(optimizer.optimizer)
        self.step_on_pairs(learner, fitted, batch, phase, is_last, self.reward_model.batch_size)
        if is_last:
            learner.record_held_out(held_out)
        if is_last and phase.index == self.reward_model.num_epochs - 1:
            moments = learner.moments(self.rounds.pairs)
            self.rounds = replace(self.rounds, is_fitted=True, offset=moments.offset, scale=moments.scale)

    def _learned_functions(self) -> TaskFunctions:
        """The task with the reward model's scores, as they are standardized in this round, as its reward."""
        reward = LearnedReward(self.reward_learner, Moments(self.rounds.offset, self.rounds.scale))
        # It is no function of the user: it runs in place, where its weights are.
        return replace(self.task_functions, reward=reward.checked(self.num_agents), workers=RewardWorkers())

    @override
    def candidate_functions(self) -> tuple[TaskFunctions, bool]:
        if self.preference_scoring == "reward_model" and self.rounds.is_fitted:
            return self._learned_functions(), False
        return self.task_functions, True

    @override
    def save_models(self, folder: Path) -> None:
        """Write the agents as every algorithm does, and the reward model beside them: ``reward_model/``."""
        super().save_models(folder)
        self.reward_network.save(folder)
