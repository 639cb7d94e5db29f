"""Multi-agent DPO: the policies themselves are fitted to pairs."""

from __future__ import annotations

from typing import Any

from torch.nn import Parameter
from typing_extensions import override

from comlrl_lightning.algorithms.checks import refuse_settings
from comlrl_lightning.algorithms.preference import PreferenceModule
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.learning.preferences import PreferenceLearner, PreferenceSettings
from comlrl_lightning.metrics import preference_keys
from comlrl_lightning.preferences.rounds import Phase

POLICY_GRADIENT = (
    "num_generations",
    "max_nodes",
    "reference_kl_coef",
    "rollout_buffer_size",
    "num_inner_epochs",
    "clip_epsilon",
    "clip_epsilon_high",
    "importance_level",
    "entropy_coef",
)
"""Settings of policy gradients, which a preference loss does not have."""


class MADPO(PreferenceModule):
    """Multi-Agent DPO: raises the joint log-probability of the better answers over that of the worse ones.

    The loss of a pair is ``-log sigmoid(beta * sum_i m_i)``, where agent i's margin ``m_i`` is the log-probability of
    its part of the winner minus that of its part of the loser: DPO (https://arxiv.org/abs/2305.18290) of the product of
    all policies. All agents step at once, each with the others' margins as they were before the step.

    Each learning epoch is one pass over the round's pairs; `train_batch_size` counts pairs per optimizer step, over all
    ranks (None: a training step's share of them).

    Args:
        beta: Scale of the margins: the larger, the earlier a pair counts as learned.
        reference_free: Compare the policies' margins with 0; otherwise with those of the reference policies, which stay
            the initial ones in all rounds.
        length_normalized: Take the mean over a completion's tokens in place of the sum.
    """

    fixed_settings = (
        *(name for name in PreferenceModule.fixed_settings if name not in POLICY_GRADIENT),
        "beta",
        "reference_free",
        "length_normalized",
    )

    def __init__(
        self,
        *args: Any,
        beta: float = 0.1,
        reference_free: bool = True,
        length_normalized: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_settings("MADPO", POLICY_GRADIENT, kwargs, "it has no policy gradient")
        super().__init__(
            *args,
            num_generations=1,
            max_nodes=1,
            reference_kl_coef=0.0,
            rollout_buffer_size=None,
            num_inner_epochs=1,
            clip_epsilon=None,
            clip_epsilon_high=None,
            importance_level="token",
            entropy_coef=0.0,
            **kwargs,
        )
        self._leave_out(POLICY_GRADIENT)
        given = {"beta": beta, "reference_free": reference_free, "length_normalized": length_normalized}
        self.save_hyperparameters(given)
        self.preference = PreferenceSettings(beta, reference_free, length_normalized, self.policy.temperature)
        self._set_up_metrics(preference_keys(self.team_size, direct=True))

    @property
    @override
    def uses_reference(self) -> bool:
        return not self.preference.reference_free

    @override
    def build_learners(self) -> None:
        super().build_learners()
        self.preference_learner = PreferenceLearner(self.team, self.preference, self.updates.micro_batch_tokens)

    @override
    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        return self.preference_learner.parameter_groups()

    @override
    def _learn(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        pairs = self.rounds.pairs
        self._step_on_pairs(self.preference_learner, pairs, batch, phase, is_last, self.updates.train_batch_size)
