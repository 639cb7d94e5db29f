"""Rollouts of a module's team; evaluation and prediction, which take one completion per agent and turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from typing_extensions import override

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms.checks import check_batch
from comlrl_lightning.algorithms.updating import BufferedUpdates
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.rollouts.collect import Collector, RolloutShape, Sampler, TaskInterface
from comlrl_lightning.rollouts.credit import assign_credit
from comlrl_lightning.rollouts.recording import (
    prediction,
    record_final_rewards,
    record_late,
    record_left_out,
    record_nodes,
    record_unparsed,
)
from comlrl_lightning.strategies.sharded_parallel import follow_strategy
from comlrl_lightning.types import RolloutListener, Rollouts, merge_rollouts
from comlrl_lightning.utilities.distributed import gather_objects, meet

TRAIN, EVALUATE, PREDICT, COMPARE = range(4)
"""Stages that keep the random streams of completions apart."""


class Evaluations(BufferedUpdates):
    """The part of a cooperative module that rolls its team out and changes no weight."""

    interface: TaskInterface
    shape: RolloutShape
    eval_sampling: Sampling
    discount: float
    eval_seed: int | None
    evaluation_metrics: MetricTable
    trained_names: frozenset[str]
    """Names of the weights that were trained when the models had loaded, also while a callback freezes some."""
    _evaluated: list[Rollouts]
    _gathered: Rollouts | None = None

    @override
    def configure_model(self) -> None:
        if self._modules.get("team") is None:
            self.load_models()
            self.trained_names = frozenset(name for name, one in self.named_parameters() if one.requires_grad)
        follow_strategy(self)

    def load_models(self) -> None:
        """Load the team, and make what learns."""
        raise NotImplementedError

    def _collect(
        self,
        batch: TaskBatch,
        stage: int,
        sampling: Sampling,
        shape: RolloutShape,
        sampler: Sampler | None = None,
        interface: TaskInterface | None = None,
    ) -> Rollouts:
        """Roll out the items of a batch.

        Args:
            batch: The items.
            stage: Keeps random streams apart.
            sampling: How completions are drawn.
            shape: Width and depth.
            sampler: Who answers; None: the team.
            interface: The user's functions; None: those of the module.
        """
        seed = self.eval_seed if stage in (EVALUATE, PREDICT) and self.eval_seed is not None else self.seed
        key = (seed, stage, 0 if stage in (EVALUATE, PREDICT) else batch.epoch)
        collector = Collector(
            self.team if sampler is None else sampler,
            self.interface if interface is None else interface,
            shape,
            sampling,
            key,
            self._show_progress,
        )
        return collector.collect(batch.items, batch.indices, keep_unscored=stage == PREDICT)

    def _show_progress(self, turn: int, rows_running: int) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutListener):
                callback.on_rollout_progress(turn, rows_running)

    @override
    def on_validation_epoch_start(self) -> None:
        self._evaluated.clear()
        self._gathered = None
        self.evaluation_metrics.pop()  # an evaluation that failed may have left something
        self.interface.reward.pop_parts()

    @override
    def validation_step(self, batch: TaskBatch, batch_idx: int) -> None:
        check_batch(batch)
        rollouts = self._collect(batch, EVALUATE, self.eval_sampling, self._single_path)
        self._evaluated.append(rollouts)
        self._gathered = None
        credited = assign_credit(rollouts, self.discount)
        record_nodes(self.evaluation_metrics, credited, self.interface.reward.pop_parts())
        record_final_rewards(self.evaluation_metrics, rollouts)
        record_unparsed(self.evaluation_metrics, rollouts)
        record_late(self.evaluation_metrics, rollouts)
        record_left_out(self.evaluation_metrics, rollouts)
        if self.policy.reference_kl_coef > 0:
            self.learner.record_kl(self.evaluation_metrics, [entry.node for entry in credited])
        meet()

    @override
    def on_validation_epoch_end(self) -> None:
        metrics = self.evaluation_metrics.pop()
        if metrics:
            # "step" is what Lightning takes for the x-axis of its loggers. All ranks have the same values already:
            # their maximum is exact, and Lightning does not ask for a reduction.
            steps = {"env_step": float(self.env_step), "step": float(self.env_step)}
            self.log_dict({**metrics, **steps}, batch_size=1, sync_dist=True, reduce_fx="max")

    @override
    def on_validation_end(self) -> None:
        self._gathered = None

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_validation_end

    @property
    def _single_path(self) -> RolloutShape:
        """One completion per agent and turn."""
        return replace(self.shape, num_generations=1, joint_mode="aligned")

    def evaluation_rollouts(self) -> Rollouts:
        """Everything that the running evaluation has sampled, from all ranks in item order. Call it on every rank.

        It is gathered once, however many callbacks ask.
        """
        if self._gathered is None:
            self._gathered = merge_rollouts(gather_objects(self._evaluated))
        return self._gathered

    @override
    def predict_step(self, batch: TaskBatch, batch_idx: int) -> list[dict[str, Any]]:
        check_batch(batch)
        rollouts = self._collect(batch, PREDICT, self.eval_sampling, self._single_path)
        self.interface.reward.pop_parts()  # predictions are no part of the next log
        meet()
        return [prediction(rollouts, node) for node in rollouts.nodes]
