"""Multi-agent DPO: the policies themselves are fitted to pairs."""

from typing import Literal

from torch.nn import Parameter
from typing_extensions import override

from comlrl_lightning.algorithms.preference import PreferenceModule
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.learning.preferences import PreferenceLearner, PreferenceSettings
from comlrl_lightning.metrics import preference_keys
from comlrl_lightning.preferences.rounds import Phase


class MADPO(PreferenceModule):
    """Multi-Agent DPO: raises the joint log-probability of the better answers over that of the worse ones.

    The loss of a pair is ``-log sigmoid(beta * sum_i m_i)``, where agent i's margin ``m_i`` is the log-probability of
    its part of the winner minus that of its part of the loser: DPO (https://arxiv.org/abs/2305.18290) of the product of
    all policies. All agents step at once, each with the others' margins as they were before the step.

    Each learning epoch is one pass over the round's pairs.
    """

    beta: float = 0.1
    """Scale of the margins: the larger, the earlier a pair counts as learned."""
    reference_free: bool = True
    """Compare the policies' margins with 0; otherwise with those of the reference policies, which stay the initial ones
    in all rounds."""
    length_normalized: bool = False
    """Take the mean over a completion's tokens in place of the sum, which is biased by length. Margins are smaller;
    a usual `beta` is 2 (https://arxiv.org/abs/2405.14734)."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """``"sigmoid"``, or ``"ipo"``: ``(sum of the margins - 1 / (2 * beta))^2``, which stops at that sum
    (https://arxiv.org/abs/2310.12036)."""
    label_smoothing: float = 0.0
    """Share of the pairs whose order is taken for wrong, from 0 to below .5: for rewards that are noisy
    (https://ericmitchell.ai/cdpo.pdf)."""
    nll_coef: float = 0.0
    """Weight of an anchor, minus the mean log-probability per token of the winner, added over the agents
    (https://arxiv.org/abs/2404.19733): it keeps winners likely where the loss alone only pushes losers down."""

    @override
    def check_settings(self) -> None:
        super().check_settings()
        self.preference_settings = PreferenceSettings(
            self.beta,
            self.reference_free,
            self.length_normalized,
            self.sampling.temperature,
            self.loss_type,
            self.label_smoothing,
            self.nll_coef,
        )

    @override
    def training_metric_keys(self) -> list[str]:
        return [*super().training_metric_keys(), *preference_keys(self.team_size, direct=True)]

    @property
    @override
    def uses_reference(self) -> bool:
        return not self.reference_free

    @override
    def build_learners(self) -> None:
        super().build_learners()
        self.preference_learner = PreferenceLearner(self.team, self.preference_settings, self.micro_batch_tokens)

    @override
    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        return self.preference_learner.parameter_groups()

    @override
    def learn(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        self.step_on_pairs(self.preference_learner, self.rounds.pairs, batch, phase, is_last, self.train_batch_size)
