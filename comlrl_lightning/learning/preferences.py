"""Joint direct preference optimization as a plain object: the loss of a team on pairs of joint completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from comlrl_lightning.agents.batches import micro_batches, sequence_lengths
from comlrl_lightning.agents.team import AgentTeam, TokenScores
from comlrl_lightning.functional import PreferenceLossType, joint_preference_loss, masked_sum, sequence_log_probs
from comlrl_lightning.functional.preferences import check_loss_type
from comlrl_lightning.learning.policy import agent_group
from comlrl_lightning.metrics import MetricTable, agent_key, preference_key
from comlrl_lightning.preferences.pairs import PreferencePair
from comlrl_lightning.types import Completion
from comlrl_lightning.utilities.checks import check_at_least, check_flag, check_positive, check_share


@dataclass(frozen=True, slots=True)
class PreferenceSettings:
    """Settings of the preference loss, as `MADPO` documents them."""

    beta: float
    reference_free: bool
    length_normalized: bool
    temperature: float
    loss_type: PreferenceLossType
    label_smoothing: float
    nll_coef: float

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        check_at_least(0.0, beta=self.beta, nll_coef=self.nll_coef)  # None passes the former
        check_share(label_smoothing=self.label_smoothing)
        check_loss_type(self.loss_type, self.label_smoothing)
        check_flag(reference_free=self.reference_free, length_normalized=self.length_normalized)


@dataclass(slots=True)
class PreferenceStats:
    """Sums over the pairs of one optimizer step."""

    num_agents: int
    loss: float = 0.0
    num_right: float = 0.0
    margins: Tensor = field(init=False)
    """`[N]` sums of the margins of each agent."""
    sides: Tensor = field(init=False)
    """`[N, 2]` sums of what the margins are made of: log-probabilities of the winners and of the losers."""
    drift: Tensor = field(init=False)
    """`[N, 2]` size of the change of the log-probability since sampling, summed, and the number of completions of known
    origin."""

    def __post_init__(self) -> None:
        self.margins = torch.zeros(self.num_agents, dtype=torch.float64)
        self.sides = torch.zeros(self.num_agents, 2, dtype=torch.float64)
        self.drift = torch.zeros(self.num_agents, 2, dtype=torch.float64)

    def sums_of_losses(self) -> dict[str, float]:
        """The loss of this rank, which all agents have together."""
        return {"the pairs": self.loss}

    def record(self, table: MetricTable, num_rows: int) -> None:
        """Write the means of this optimizer step to the metrics."""
        if not num_rows:
            return
        table.update(preference_key("loss"), self.loss / num_rows, float(num_rows))
        table.update(preference_key("accuracy"), self.num_right / num_rows, float(num_rows))
        for agent in range(self.num_agents):
            table.update(agent_key(agent, "margin"), self.margins[agent] / num_rows, float(num_rows))
            for name, total in zip(("chosen_log_prob", "rejected_log_prob"), self.sides[agent], strict=True):
                table.update(agent_key(agent, name), total / num_rows, float(num_rows))
            drift, count = self.drift[agent].tolist()
            if count:
                table.update(agent_key(agent, "log_prob_drift"), drift / count, count)


class PreferenceLearner:
    """Fits all policies of a team to pairs at once.

    The margin of an agent is the log-probability of its part of the winner minus that of its part of the loser. All
    agents' margins add up before the loss, so that the gradient of each is weighted by what the team as a whole gets
    wrong, with the others' margins as they were before the step.

    Args:
        team: The agents.
        settings: Settings of the loss.
        micro_batch_tokens: Padded tokens per forward pass; a pair is never split.
    """

    def __init__(self, team: AgentTeam, settings: PreferenceSettings, micro_batch_tokens: int) -> None:
        self.team = team
        self.settings = settings
        self.micro_batch_tokens = micro_batch_tokens

    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        """Trained parameters by agent."""
        return {agent_group(agent): self.team.agent_parameters(agent) for agent in range(self.team.num_agents)}

    def active_groups(self, pairs: Sequence[PreferencePair]) -> set[str]:
        """Every agent has a gradient from every pair."""
        return {agent_group(agent) for agent in range(self.team.num_agents)} if pairs else set()

    def new_stats(self) -> PreferenceStats:
        """Empty sums of one optimizer step."""
        return PreferenceStats(self.team.num_agents)

    def losses(self, pairs: Sequence[PreferencePair], stats: PreferenceStats) -> Iterator[Tensor]:
        """Summed losses of one mini-batch, one micro-batch after the other: call backward before taking the next.

        Args:
            pairs: The mini-batch; divide the gradients by its number of pairs.
            stats: Gets the sums to log.
        """
        lengths = [2 * self.team.num_agents * max(sequence_lengths(_rows([pair]))) for pair in pairs]
        for positions in micro_batches(lengths, self.micro_batch_tokens):
            yield self.loss([pairs[position] for position in positions], stats)

    def loss(self, pairs: Sequence[PreferencePair], stats: PreferenceStats) -> Tensor:
        """`[]` summed loss of some pairs.

        Args:
            pairs: The pairs.
            stats: Gets the sums to log.
        """
        rows, settings = _rows(pairs), self.settings
        scores = self.team.log_probs(rows, temperature=settings.temperature)
        sides, reference_margins = self._sides(scores), None
        margins = sides[0] - sides[1]
        if not settings.reference_free:
            with torch.no_grad():
                reference = self.team.log_probs(rows, temperature=settings.temperature, reference=True)
                chosen, rejected = self._sides(reference)
                reference_margins = chosen - rejected
        losses = joint_preference_loss(
            margins,
            settings.beta,
            reference_margins,
            loss_type=settings.loss_type,
            label_smoothing=settings.label_smoothing,
        )
        if settings.nll_coef:
            losses = losses - settings.nll_coef * self._sides(scores, per_token=True)[0].sum(1)
        total = margins if reference_margins is None else margins - reference_margins
        stats.loss += float(losses.detach().cpu().double().sum())
        stats.num_right += float((total.detach().sum(1) > 0).sum())
        stats.margins += margins.detach().cpu().double().sum(0)
        stats.sides += sides.detach().cpu().double().sum(1).T
        self._add_drift(rows, scores, stats)
        return losses.sum()

    def _sides(self, scores: TokenScores, *, per_token: bool = False) -> Tensor:
        """`[2, R, N]` log-probabilities of winners and losers of pairs whose completions stand in `_rows`' order."""
        log_probs, mask = (
            table.view(-1, 2, self.team.num_agents, table.shape[1]).transpose(0, 1)
            for table in (scores.log_probs, scores.completion_mask)
        )
        return sequence_log_probs(log_probs, mask, length_normalized=per_token or self.settings.length_normalized)

    def _add_drift(self, rows: Sequence[Completion], scores: TokenScores, stats: PreferenceStats) -> None:
        sums = masked_sum(scores.log_probs, scores.completion_mask).tolist()
        for one, now in zip(rows, sums, strict=True):
            if one.log_probs:  # nobody knows what another model's text was worth to the policy
                stats.drift[one.agent] += torch.tensor([abs(now - sum(one.log_probs)), 1.0], dtype=torch.float64)


def _rows(pairs: Sequence[PreferencePair]) -> list[Completion]:
    """`[R * 2 * N]` completions: pair by pair, the winner's of all agents, then the loser's."""
    return [one for pair in pairs for side in (pair.winner, pair.loser) for one in side]
