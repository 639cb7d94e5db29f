"""Gradients of one optimizer step: backward passes, their mean over ranks, clipping per group, and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter

from comlrl_lightning.learning.gradients import average_gradients, clip_gradients, nonfinite_on_any_rank
from comlrl_lightning.metrics import MetricTable, group_key

R = TypeVar("R", contravariant=True)
S = TypeVar("S", bound="StepStats")


class StepStats(Protocol):
    """Sums over the rows of one optimizer step."""

    def sums_of_losses(self) -> dict[str, float]:
        """Losses of this rank by name; the same names on every rank."""
        ...

    def record(self, metrics: MetricTable, num_rows: int) -> None:
        """Write their means to the metrics."""
        ...


class StepLearner(Protocol[R, S]):
    """A loss over rows R (nodes, pairs) and the parameters that it trains."""

    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        """Trained parameters by group."""
        ...

    def active_groups(self, rows: Sequence[R], /) -> set[str]:
        """Groups that get a gradient from these rows."""
        ...

    def new_stats(self) -> S:
        """Empty sums to log."""
        ...

    def losses(self, rows: Sequence[R], stats: S, /) -> Iterator[Tensor]:
        """Summed losses of micro-batches: call backward before taking the next."""
        ...


class OptimizerSteps:
    """Accumulates the gradients of mini-batches of any learner.

    Args:
        metrics: Table that gets gradient norms, losses and skipped updates.
        max_grad_norm: Largest gradient norm per group; None: no clipping.
        on_nonfinite: Stop at a loss or gradient that is not finite, or leave the step out.
    """

    def __init__(
        self, metrics: MetricTable, max_grad_norm: float | None, on_nonfinite: Literal["raise", "skip"]
    ) -> None:
        self.metrics = metrics
        self.max_grad_norm = max_grad_norm
        self.on_nonfinite = on_nonfinite

    def accumulate(
        self,
        learner: StepLearner[R, S],
        rows: Sequence[R],
        backward: Callable[[Tensor], None],
        env_step: int,
    ) -> Literal["moves", "idle", "nonfinite"]:
        """Gradients of an optimizer step on this rank's rows, which may be empty. Call it on every rank.

        Args:
            learner: Loss over rows.
            rows: Mini-batch of this rank.
            backward: Backward pass of a loss, without communication between ranks.
            env_step: Position of the run, for messages.

        Returns:
            Whether the step moves weights, has nothing to learn from, or is to be left out.

        Raises:
            ValueError: If a loss or gradient is not finite and that stops the run.
        """
        stats = learner.new_stats()
        for loss in learner.losses(rows, stats):
            backward(loss)
        groups = {name: list(group.values()) for name, group in learner.parameter_groups().items()}
        active_here = learner.active_groups(rows)
        moves = [name in active_here and any(one.requires_grad for one in group) for name, group in groups.items()]
        active = average_gradients(list(groups.values()), len(rows), moves)
        moving = {name: group for (name, group), is_active in zip(groups.items(), active, strict=True) if is_active}
        if moving and not self._clip(moving, stats, env_step):
            return "nonfinite"
        stats.record(self.metrics, len(rows))
        return "moves" if moving else "idle"

    def _clip(self, groups: Mapping[str, Sequence[Parameter]], stats: StepStats, env_step: int) -> bool:
        """Clip each group's gradients; False when they or the losses are not finite and the step is to be skipped."""
        norms = {name: clip_gradients(group, self.max_grad_norm) for name, group in groups.items()}
        kind, kinds, broken = "loss", "losses", nonfinite_on_any_rank(stats.sums_of_losses())
        if not broken:  # norms are those of all ranks already
            kind, kinds, broken = "gradient", "gradients", [name for name in norms if not math.isfinite(norms[name])]
        self.metrics.update("nonfinite_updates", float(bool(broken)))
        if broken and self.on_nonfinite == "raise":
            raise ValueError(
                f"The {kind} of {broken[0]} is not finite at env_step {env_step}. Lower the learning rate, look at"
                " the rewards, or leave such updates out with on_nonfinite='skip'."
            )
        if broken:
            rank_zero_warn(f"An update was left out: the {kinds} of {', '.join(broken)} are not finite.")
            return False
        for name, norm in norms.items():
            self.metrics.update(group_key(name, "grad_norm"), norm)
            is_clipped = self.max_grad_norm is not None and norm > self.max_grad_norm
            self.metrics.update(group_key(name, "clipped_update_share"), float(is_clipped))
        return True
