"""Multi-agent RLHF: a reward model is fitted to pairs, then the policies learn from its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.nn import Parameter
from typing_extensions import override

from comlrl_lightning.algorithms.methods import (
    ActorCritic,
    ActorCriticName,
    CriticFree,
    CriticFreeName,
    Method,
)
from comlrl_lightning.algorithms.module import CooperativeModule
from comlrl_lightning.algorithms.preference import PreferenceModule
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.keywords import keywords_of
from comlrl_lightning.learning.reward_model import LearnedReward, Moments, RewardLearner, build_reward_model
from comlrl_lightning.metrics import preference_keys
from comlrl_lightning.preferences.rounds import Phase, Schedule
from comlrl_lightning.rollouts.collect import TaskInterface
from comlrl_lightning.rollouts.credit import CreditedNode
from comlrl_lightning.rollouts.recording import record_learned_rewards
from comlrl_lightning.types import Rollouts
from comlrl_lightning.utilities.checks import check_choice, check_kind
from comlrl_lightning.utilities.distributed import sum_over_ranks
from comlrl_lightning.utilities.plain import from_plain, to_plain

PolicyName = CriticFreeName | ActorCriticName
"""The algorithms that learn from rewards."""


class MARLHF(PreferenceModule):
    """Multi-Agent RLHF: fits a joint reward model to the pairs, then learns from its scores by policy gradients.

    A round collects, then fits the reward model for ``reward_model.num_epochs`` epochs (each one pass over the pairs),
    then learns for `learning_epochs` epochs on the task items, as the algorithm of `policy` does on a reward function,
    with the settings of rollouts, buffer and loss given here. Its rewards are the reward model's scores, which reward
    metrics show as ``learned/...``; evaluations and candidates are scored by the task.

    Args:
        reward_model: The reward model and how it is fitted.
        policy: The algorithm that learns from the scores, by name or with settings of its own.
        preference_scoring: What ranks the candidates: the ``"task"``'s reward, or, from the second round on, the
            ``"reward_model"`` of the round before.
    """

    fixed_settings = (*PreferenceModule.fixed_settings, "reward_model", "policy", "preference_scoring")

    def __init__(
        self,
        *args: Any,
        reward_model: JointRewardModel = JointRewardModel(),  # noqa: B008  (frozen)
        policy: PolicyName | CriticFree | ActorCritic = "MAGRPO",
        preference_scoring: Literal["task", "reward_model"] = "task",
        **kwargs: Any,
    ) -> None:
        for name in self.explained_keywords():
            if name in kwargs:
                raise ValueError(f"MARLHF({name}=...) is a setting of policy=. Give it to CriticFree or ActorCritic.")
        super().__init__(*args, **kwargs)
        given = {"reward_model": to_plain(reward_model), "policy": to_plain(policy)}
        self.save_hyperparameters({**given, "preference_scoring": preference_scoring})
        self.reward_model: JointRewardModel = from_plain("reward_model", reward_model)
        check_kind(JointRewardModel, reward_model=self.reward_model)
        check_choice(("task", "reward_model"), preference_scoring=preference_scoring)
        self.preference_scoring = preference_scoring
        self.schedule = Schedule(self.reward_model.num_epochs, self.schedule.learning_epochs)
        self._set_up_method(policy_method(from_plain("policy", policy)))
        if self.method is not None and self.method.algorithm == "MAREINFORCE" and not self.reward_model.standardize:
            raise ValueError(
                "policy='MAREINFORCE' has no baseline, and a reward model's scores no zero: with"
                " reward_model.standardize=False all answers might be pushed up. Use standardize=True."
            )

    @override
    @classmethod
    def explained_keywords(cls) -> tuple[str, ...]:
        return *keywords_of(CriticFree), *keywords_of(ActorCritic)

    @override
    def _set_up_metrics(self, extra: Sequence[str] = ()) -> None:
        super()._set_up_metrics([*extra, *preference_keys(self.team_size, direct=False)])

    @override
    def build_learners(self) -> None:
        PreferenceModule.build_learners(self)
        CooperativeModule.build_learners(self)
        self.reward_network = build_reward_model(self.reward_model, self.team, self.num_agents)
        self.reward_learner = RewardLearner(
            self.reward_network,
            self.reward_model,
            self.updates.micro_batch_tokens,
            self.training_metrics,
            self.interface.joint_format,
            self.num_agents,
        )

    @override
    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        return {**super().parameter_groups(), **self.reward_learner.parameter_groups()}

    @override
    def initial_learning_rates(self) -> list[float]:
        return [*super().initial_learning_rates(), self.reward_model.initial_learning_rate]

    @override
    def _learn(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        if phase.kind == "reward":
            self._fit_reward_model(batch, phase, is_last)
        elif self.rounds.pairs and self.rounds.is_fitted:
            CooperativeModule._train_on(self, batch, is_last)
        else:
            self._idle_step()

    def _fit_reward_model(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        """One training step of an epoch that fits the reward model."""
        learner = self.reward_learner
        fitted, held_out = learner.split(self.rounds.pairs, self.seed)
        if not fitted:
            self._idle_step()
            return
        if batch.start == phase.index == 0:
            optimizer = self.optimizers()
            assert isinstance(optimizer, LightningOptimizer)
            learner.reset(optimizer.optimizer)
        self._step_on_pairs(learner, fitted, batch, phase, is_last, self.reward_model.batch_size)
        if is_last:
            learner.record_held_out(held_out)
        if is_last and phase.index == self.reward_model.num_epochs - 1:
            moments = learner.moments(self.rounds.pairs)
            self.rounds = replace(self.rounds, is_fitted=True, offset=moments.offset, scale=moments.scale)

    def _learned_interface(self) -> TaskInterface:
        """The task with the reward model's scores, as they are standardized in this round, as its reward."""
        reward = LearnedReward(self.reward_learner, Moments(self.rounds.offset, self.rounds.scale))
        # It is no function of the user: it runs in place, where its weights are.
        return replace(self.interface, reward=reward.checked(self.num_agents), workers=RewardWorkers())

    @override
    def _training_interface(self) -> TaskInterface:
        return self._learned_interface()

    @override
    def _candidate_interface(self) -> tuple[TaskInterface, bool]:
        if self.preference_scoring == "reward_model" and self.rounds.is_fitted:
            return self._learned_interface(), False
        return self.interface, True

    @override
    def _record_collection(self, rollouts: Rollouts, credited: Sequence[CreditedNode]) -> None:
        self.env_step += round(sum_over_ranks(rollouts.num_scored))
        record_learned_rewards(self.training_metrics, rollouts, credited)

    @override
    def _save_parts(self, folder: Path) -> None:
        """The agents as every algorithm saves them, and the reward model beside them: ``reward_model/``."""
        super()._save_parts(folder)
        self.reward_network.save(folder)


def policy_method(policy: object) -> Method:
    """The settings of policy learning, from themselves or from the name of an algorithm.

    Raises:
        ValueError: If there is no such algorithm.
    """
    if isinstance(policy, CriticFree | ActorCritic):
        return policy
    for name in get_args(CriticFreeName):
        if policy == name:
            return CriticFree(name)
    for name in get_args(ActorCriticName):
        if policy == name:
            return ActorCritic(name)
    names = ", ".join(map(repr, (*get_args(CriticFreeName), *get_args(ActorCriticName))))
    raise ValueError(f"policy={policy!r} is unknown. Use one of {names}, CriticFree(...) or ActorCritic(...).")
