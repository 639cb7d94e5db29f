"""Updates from a buffer: mini-batches of nodes, one optimizer step each, gradients averaged over ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol, TypeVar

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR
from typing_extensions import override

from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms.checks import OptimizerFactory, SchedulerFactory
from comlrl_lightning.learning.gradients import (
    IdleSteps,
    average_gradients,
    clip_gradients,
    nonfinite_on_any_rank,
)
from comlrl_lightning.learning.policy import Learner
from comlrl_lightning.learning.settings import PolicySettings, UpdateSettings
from comlrl_lightning.metrics import MetricTable, group_key
from comlrl_lightning.preferences.pairs import shuffled
from comlrl_lightning.rollouts.credit import CreditedNode
from comlrl_lightning.strategies.sharding import Lockstep
from comlrl_lightning.utilities.distributed import max_over_ranks, sum_over_ranks, world_size
from comlrl_lightning.utilities.plain import refuse

R = TypeVar("R", contravariant=True)
S = TypeVar("S", bound="StepStats")


class StepStats(Protocol):
    """Sums over the rows of one optimizer step."""

    def sums_of_losses(self) -> dict[str, float]:
        """The losses of this rank by whose they are; the same names on every rank."""
        ...

    def record(self, table: MetricTable, num_rows: int) -> None:
        """Write their means to the metrics."""
        ...


class StepLearner(Protocol[R, S]):
    """What one optimizer step needs to know about a loss over rows R (nodes, pairs)."""

    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        """Trained parameters by group."""
        ...

    def active_groups(self, nodes: Sequence[R], /) -> set[str]:
        """Groups that get a gradient from these rows."""
        ...

    def new_stats(self) -> S:
        """Empty sums to log."""
        ...

    def losses(self, nodes: Sequence[R], stats: S, /) -> Iterator[Tensor]:
        """Summed losses of micro-batches: call backward before taking the next."""
        ...


class BufferedUpdates(LightningModule):
    """The half of a cooperative module that learns: whoever fills the buffer, this empties it."""

    policy: PolicySettings
    updates: UpdateSettings
    training_metrics: MetricTable
    buffer: list[CreditedNode]
    seed: int
    env_step: int
    update_step: int
    """Optimizer steps that changed weights; Lightning's `global_step` counts the others, too."""
    idle_steps: IdleSteps
    num_agents: int
    num_turns: int
    team: AgentTeam
    learner: Learner
    learning_rates: list[float]
    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None
    missing_factories: Mapping[str, str]
    lockstep: Lockstep | None = None
    """What passes of sharded models go through; None: the models are whole."""

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        refuse(self.missing_factories)
        named = self.parameter_groups().items()
        groups = [
            {"params": list(parameters.values()), "name": name, "lr": rate}
            for (name, parameters), rate in zip(named, self.learning_rates, strict=True)
        ]
        optimizer = self.optimizer(groups)
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.lr_scheduler(optimizer), "name": "lr"}}

    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        """Everything that is trained, by group."""
        return self.learner.parameter_groups()

    @override
    def get_extra_state(self) -> dict[str, int]:
        """The counters, which go with the weights: a fit in processes of its own brings back nothing else."""
        return {"env_step": self.env_step, "update_step": self.update_step}

    @override
    def set_extra_state(self, state: dict[str, int]) -> None:
        self.env_step, self.update_step = state["env_step"], state["update_step"]

    def _buffer_is_full(self) -> bool:
        """Whether the buffers of all ranks together hold enough; the same answer on every rank."""
        size = sum_over_ranks(len(self.buffer))
        return size > 0 and size >= (self.updates.rollout_buffer_size or 0)

    def _update(self) -> None:
        """Learn from the whole buffer and empty it."""
        started = time.perf_counter()
        updates = self.updates
        per_rank = None if updates.train_batch_size is None else max(1, updates.train_batch_size // world_size())
        largest = max_over_ranks(len(self.buffer))
        if not largest:
            return
        num_batches = 1 if per_rank is None else -(-largest // per_rank)
        stale = num_batches * updates.num_inner_epochs > 1
        if stale and self.policy.clip_epsilon is None:
            rank_zero_warn(
                f"{num_batches * updates.num_inner_epochs} optimizer steps use the same rollouts without clipping."
                " Give clip_epsilon, for example 0.2, or use num_inner_epochs=1 and train_batch_size=None."
            )
        prepared = self.learner.prepare(self.buffer, self.num_turns, stale)
        for inner_epoch in range(updates.num_inner_epochs):
            order = self._order(len(prepared), inner_epoch) if num_batches > 1 else list(range(len(prepared)))
            size = per_rank or max(len(prepared), 1)
            for batch in range(num_batches):
                chosen = order[batch * size : (batch + 1) * size]
                self._optimizer_step(self.learner, [prepared[node] for node in chosen])
        self.buffer.clear()
        self.training_metrics.update("time/update", time.perf_counter() - started)

    def _order(self, num_nodes: int, inner_epoch: int) -> list[int]:
        """Order of the nodes in one pass over the buffer, from its own random stream."""
        return shuffled(range(num_nodes), (self.seed, self.env_step, inner_epoch))

    def _optimizer_step(self, learner: StepLearner[R, S], rows: Sequence[R]) -> None:
        """One step of the optimizer on a mini-batch of this rank's rows, which may be empty."""
        optimizer = self._emptied_optimizer()
        stats = learner.new_stats()
        for loss in learner.losses(rows, stats):
            self._backward(loss)
        groups = {name: list(group.values()) for name, group in learner.parameter_groups().items()}
        here = learner.active_groups(rows)
        moves = [name in here and any(one.requires_grad for one in group) for name, group in groups.items()]
        active = average_gradients(list(groups.values()), len(rows), moves)
        moving = {name: group for (name, group), is_active in zip(groups.items(), active, strict=True) if is_active}
        if moving and not self._clip(moving, stats):
            self._count_step(self._emptied_optimizer(), moves=False)
            return
        stats.record(self.training_metrics, len(rows))
        self._count_step(optimizer, moves=bool(moving))
        self.idle_steps.count(is_idle=not moving)

    def _idle_step(self) -> None:
        """The step of a mini-batch that has nothing to learn from. Call it on every rank."""
        self._count_step(self._emptied_optimizer(), moves=False)
        self.idle_steps.count(is_idle=True)

    def _count_step(self, optimizer: LightningOptimizer, *, moves: bool) -> None:
        """Step optimizer and schedule. Without gradients no weight moves, momentum or not, but Lightning counts."""
        self.update_step += moves  # before the step: from here on the weights may be others
        optimizer.step()
        scheduler = self.lr_schedulers()
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, SWALR):  # that one counts epochs
            scheduler.step()

    def _emptied_optimizer(self) -> LightningOptimizer:
        """The optimizer, whose parameters have no gradients."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        optimizer.zero_grad(set_to_none=True)
        return optimizer

    def _backward(self, loss: Tensor) -> None:
        """Gradients of this rank alone; `average_gradients` adds the ranks once per optimizer step."""
        if self.lockstep is not None:
            loss = self.lockstep.with_idle(loss)
        if not loss.requires_grad:  # a callback has frozen all that it depends on
            return
        model = self.trainer.strategy.model
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            self.manual_backward(loss)

    def _clip(self, groups: Mapping[str, Sequence[Parameter]], stats: StepStats) -> bool:
        """Clip each group's gradients; False when they or the losses are not finite and the step is to be skipped."""
        norms = {name: clip_gradients(group, self.updates.max_grad_norm) for name, group in groups.items()}
        kind, kinds, broken = "loss", "losses", nonfinite_on_any_rank(stats.sums_of_losses())
        if not broken:  # norms are those of all ranks already
            kind, kinds, broken = "gradient", "gradients", [name for name in norms if not math.isfinite(norms[name])]
        self.training_metrics.update("nonfinite_updates", float(bool(broken)))
        if broken and self.updates.on_nonfinite == "raise":
            raise ValueError(
                f"The {kind} of {broken[0]} is not finite at env_step {self.env_step}. Lower the learning rate, look at"
                " the rewards, or leave such updates out with on_nonfinite='skip'."
            )
        if broken:
            rank_zero_warn(f"An update was left out: the {kinds} of {', '.join(broken)} are not finite.")
            return False
        for name, norm in norms.items():
            self.training_metrics.update(group_key(name, "grad_norm"), norm)
        return True
