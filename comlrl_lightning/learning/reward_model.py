"""The joint reward model: fitted to pairs of joint completions, then the reward of those that follow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from comlrl_lightning.agents.batches import micro_batches
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.critics.loading import build_critics
from comlrl_lightning.critics.reward_settings import REWARD_MODEL, JointRewardModel
from comlrl_lightning.critics.settings import AdapterCritic
from comlrl_lightning.environment.joint_format import JointFormat, merged_prompt, split_or_empty
from comlrl_lightning.environment.prompts import RewardFunction
from comlrl_lightning.functional import bradley_terry_loss
from comlrl_lightning.metrics import MetricTable, group_key
from comlrl_lightning.preferences.pairs import PreferencePair
from comlrl_lightning.types import Completion, Prompt
from comlrl_lightning.utilities.distributed import gather_objects, rank, world_size
from comlrl_lightning.utilities.rng import key_digest

JointCompletion = tuple[Completion, ...]


def build_reward_model(settings: JointRewardModel, team: AgentTeam, num_agents: int) -> CriticTeam:
    """Load or make the reward model of a team; call it once per team.

    Args:
        settings: What it is.
        team: The agents; an `AdapterCritic` adds an adapter to the model of agent 0.
        num_agents: N, the answers that it reads; one model may have written them all.

    Raises:
        ValueError: The settings do not fit the team.
    """
    if isinstance(settings.model, AdapterCritic) and not team.trains_adapter(0):
        raise ValueError(
            "JointRewardModel(model=AdapterCritic()) needs a frozen model under it, but agent_0 trains all weights of "
            "its own. Give Separate(lora=LoraSettings()), or use JointRewardModel(model=ModelCritic(model=...))."
        )
    model = build_critics(
        settings.model,
        team,
        centralized=True,
        critic_type="q",
        name=REWARD_MODEL,
        freeze_backbone=settings.freeze_backbone,
    )
    model.bodies[0].reader.check_room(num_agents)
    return model


class Moments(NamedTuple):
    """What makes a learned reward out of a score: ``(score - offset) / scale``."""

    offset: float = 0.0
    scale: float = 1.0


@dataclass(slots=True)
class RewardStats:
    """Sums over the pairs of one optimizer step."""

    loss: float = 0.0
    num_right: float = 0.0

    def add(self, losses: Tensor, winner_scores: Tensor, loser_scores: Tensor) -> None:
        """Add the `[R]` losses and scores of pairs."""
        self.loss += float(losses.detach().cpu().double().sum())
        self.num_right += float(_is_right(winner_scores.detach(), loser_scores.detach()).sum())

    def sums_of_losses(self) -> dict[str, float]:
        """The loss of this rank."""
        return {REWARD_MODEL: self.loss}

    def record(self, table: MetricTable, num_pairs: int) -> None:
        """Write the means of this optimizer step to the metrics."""
        if num_pairs:
            table.update(group_key(REWARD_MODEL, "loss"), self.loss / num_pairs, float(num_pairs))
            table.update(group_key(REWARD_MODEL, "accuracy"), self.num_right / num_pairs, float(num_pairs))


class RewardLearner:
    """Fits a joint reward model to pairs by their Bradley-Terry loss, and scores joint completions with it.

    Args:
        model: The reward model, of `build_reward_model`.
        settings: How it is fitted and scored.
        micro_batch_tokens: Padded tokens per forward pass.
        table: Where metrics go.
        joint_format: How the completions of a centralized team are written and read; None for a decentralized one.
        num_agents: N, how many answers a completion of a centralized team holds; without meaning otherwise.
    """

    def __init__(
        self,
        model: CriticTeam,
        settings: JointRewardModel,
        micro_batch_tokens: int,
        table: MetricTable,
        joint_format: JointFormat | None = None,
        num_agents: int = 1,
    ) -> None:
        self.model = model
        self.settings = settings
        self.micro_batch_tokens = micro_batch_tokens
        self.table = table
        self.joint_format = joint_format
        self.num_agents = num_agents
        # Read once per round: not worth room on the device.
        kept = self._parameters() if settings.fresh_each_round else []
        self._first = [parameter.detach().cpu().clone() for parameter in kept]

    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        """Trained parameters of ``reward_model``."""
        return self.model.parameter_groups()

    def _parameters(self) -> list[Parameter]:
        return list(self.parameter_groups()[REWARD_MODEL].values())

    def active_groups(self, pairs: Sequence[PreferencePair]) -> set[str]:
        """Groups that have a gradient from these pairs."""
        return {REWARD_MODEL} if pairs else set()

    def new_stats(self) -> RewardStats:
        """Where an optimizer step adds up what it logs."""
        return RewardStats()

    def losses(self, pairs: Sequence[PreferencePair], stats: RewardStats) -> Iterator[Tensor]:
        """`[]` summed losses, one per forward pass of whole pairs; divide by the pairs of the mini-batch, not here.

        Args:
            pairs: The rank's part of the mini-batch.
            stats: Gets the sums to log.
        """
        sides = [(self._answers(pair.winner), self._answers(pair.loser)) for pair in pairs]
        # Both sides are rows of one pass, as long as the longer one.
        lengths = [2 * max(self.model.lengths(both)) for both in sides]
        for batch in micro_batches(lengths, self.micro_batch_tokens):
            chosen = [sides[position] for position in batch]
            values = self.model.values([winner for winner, _ in chosen] + [loser for _, loser in chosen])[:, 0]
            winner_scores, loser_scores = values.chunk(2)
            losses = bradley_terry_loss(winner_scores, loser_scores, self.settings.centering_coef)
            stats.add(losses, winner_scores, loser_scores)
            yield losses.sum()

    @torch.no_grad()
    def scores(self, samples: Sequence[JointCompletion]) -> Tensor:
        """`[R]` what the reward model says now, in float64, before any standardization.

        Args:
            samples: `[R]` joint completions with their prompts, as they were sampled.
        """
        return self._scores([self._answers(sample) for sample in samples])

    @torch.no_grad()
    def scores_of_answers(self, prompts: Sequence[Prompt], texts: Sequence[Sequence[str]]) -> Tensor:
        """`[J]` scores, in float64, of answers to the same prompts, equal to those of the sampled completions.

        Args:
            prompts: `[N]` prompts of the agents.
            texts: `[N][J]` answers.
        """
        read = list(prompts)
        if self.joint_format is not None:
            read = self._of_one_prompt(merged_prompt(self.joint_format, prompts))
        return self._scores([_unsampled(read, answers) for answers in zip(*texts, strict=True)])

    def _scores(self, answers: Sequence[JointCompletion]) -> Tensor:
        scores = torch.empty(len(answers), dtype=torch.float64)
        for batch in micro_batches(self.model.lengths(answers), self.micro_batch_tokens):
            scores[batch] = self.model.values([answers[position] for position in batch])[:, 0].cpu().double()
        return scores

    def _answers(self, sample: JointCompletion) -> JointCompletion:
        """`[N]` prompts and answers of a joint completion, whether N agents or one for all have written it."""
        if self.joint_format is None:
            return sample
        (written,) = sample
        texts, _ = split_or_empty(self.joint_format, written.text, self.num_agents)
        return _unsampled(self._of_one_prompt(written.prompt), texts)

    def _of_one_prompt(self, prompt: Prompt) -> list[Prompt]:
        """`[N]` prompts where all agents have one: no messages have no heading either."""
        return [prompt, *[[] for _ in range(1, self.num_agents)]]

    def split(self, pairs: Sequence[PreferencePair], seed: int) -> tuple[list[PreferencePair], list[PreferencePair]]:
        """Pairs to fit and pairs that are held out, the order kept; all pairs of an item are on one side.

        An item's side depends on the seed and the item alone, unless one side would be empty: each gets at least one
        item if there are two.

        Args:
            pairs: All pairs of the round.
            seed: The same for all rounds, so that what is held out once never has been fitted.
        """
        if self.settings.held_out_share == 0:
            return list(pairs), []
        ranks = {pair.item_index: key_digest((seed, pair.item_index)) for pair in pairs}
        held_out = {item for item, digest in ranks.items() if digest < self.settings.held_out_share * 2**128}
        ordered = sorted(ranks, key=lambda item: ranks[item])
        held_out = (held_out | {*ordered[:1]}) - {*ordered[-1:]}
        fitted = [pair for pair in pairs if pair.item_index not in held_out]
        return fitted, [pair for pair in pairs if pair.item_index in held_out]

    def accuracy(self, pairs: Sequence[PreferencePair]) -> float:
        """Share of the pairs whose winner has the larger score, equal scores counted half; NaN without any pair.

        Call it on every rank with the same pairs: each scores a part.
        """
        if not pairs:
            return float("nan")
        scores = self._scores_of_all_ranks(pairs)
        return float(_is_right(scores[0], scores[1]).mean())

    def record_held_out(self, pairs: Sequence[PreferencePair]) -> None:
        """Write the accuracy on pairs that are held out to the metrics; as for `accuracy`, on every rank."""
        if pairs:
            self.table.update(group_key(REWARD_MODEL, "held_out_accuracy"), self.accuracy(pairs))

    def moments(self, pairs: Sequence[PreferencePair]) -> Moments:
        """Mean and standard deviation of the scores of both sides of all pairs, by the present weights.

        Scores that do not differ are only centered. Without any pair, or any standardization, nothing is to be done.

        Args:
            pairs: All pairs of the round; call it on every rank with the same ones, each scores a part.
        """
        if not pairs or not self.settings.standardize:
            return Moments()
        scores = self._scores_of_all_ranks(pairs).flatten().tolist()
        offset = statistics.fmean(scores)
        scale = statistics.pstdev(scores, offset)
        # Rounding alone makes equal scores differ by this much.
        return Moments(offset, scale if scale > 1e-6 * max(1.0, abs(offset)) else 1.0)

    def _scores_of_all_ranks(self, pairs: Sequence[PreferencePair]) -> Tensor:
        """`[2, R]` scores of winners and losers; each rank scores a part."""
        mine = range(rank(), len(pairs), world_size())
        sides = [side for index in mine for side in (pairs[index].winner, pairs[index].loser)]
        rows = zip(mine, self.scores(sides).view(-1, 2).tolist(), strict=True)
        return torch.tensor([row for _, row in sorted(gather_objects(list(rows)))], dtype=torch.float64).T

    @torch.no_grad()
    def reset(self, optimizer: Optimizer | None = None) -> None:
        """Go back to the weights at construction, if each round is to start from them.

        Args:
            optimizer: Forgets what it knows about these weights.
        """
        if not self.settings.fresh_each_round:
            return
        for parameter, first in zip(self._parameters(), self._first, strict=True):
            parameter.copy_(first)
            if optimizer is not None:
                optimizer.state.pop(parameter, None)


class LearnedReward:
    """The learned score as a reward function of a task: ``reward_func`` of one turn.

    Args:
        learner: Scores with the weights that it has when it is called.
        moments: What standardizes the scores.
    """

    def __init__(self, learner: RewardLearner, moments: Moments = Moments()) -> None:  # noqa: B008  (immutable)
        self.learner = learner
        self.moments = moments

    def __call__(self, *completions: Sequence[str], prompts: Sequence[Prompt]) -> list[float]:
        """`[J]` rewards of the `[N][J]` answers to `[N]` prompts."""
        scores = self.learner.scores_of_answers(prompts, completions)
        return [(score - self.moments.offset) / self.moments.scale for score in scores.tolist()]

    def checked(self, num_agents: int) -> RewardFunction:
        """The form that a `TaskInterface` holds, for N agents; nothing else processes the reward."""
        return RewardFunction(self, num_agents)


def _is_right(winner_scores: Tensor, loser_scores: Tensor) -> Tensor:
    """`[R]` 1 where the winner has the larger score, 1/2 where both have the same, else 0."""
    return (torch.sign(winner_scores - loser_scores).cpu().double() + 1) / 2


def _unsampled(prompts: Sequence[Prompt], texts: Sequence[str]) -> JointCompletion:
    """`[N]` answers as completions that no agent has sampled: only their texts are read."""
    return tuple(
        Completion(agent, prompt, (), (), (), text, False)
        for agent, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    )
