"""The reward over training, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.run_path import Attempts, RunPath
from comlrl_lightning.callbacks.support import (
    EVAL_PREFIX,
    evaluation_metrics,
    has_fitted,
    is_rehearsal,
    rollout_source,
)
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.utilities.checks import is_whole
from comlrl_lightning.utilities.distributed import gather_objects

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = dict[int, list[tuple[int, float]]]
"""Per turn, (`env_step`, mean reward) in order of time."""


class RewardCurve(Callback, KnownKeywords):
    """Draw the mean reward of each training step and of each evaluation over `env_step`, one color per turn.

    The picture is drawn after each evaluation and when training ends, however it ends. An evaluation by the trainer
    after its fit becomes part of it, once per `env_step`. A resumed run continues the curve of its checkpoint. A
    picture that cannot be drawn or written ends no run.

    Args:
        path: The PNG file, relative to the working folder, or an address such as ``s3://bucket/curve.png`` that fsspec
            reaches; None takes ``reward-curve.png`` in the folder of the run.
        window: Training steps of the moving average that is drawn over the single steps.

    Raises:
        ValueError: If `path` does not end in ``.png`` or `window` is not a whole number from 1.

    Example::

        trainer = Trainer(callbacks=[RewardCurve("runs/reward-curve.png")])
    """

    def __init__(self, path: str | Path | None = None, window: int = 10) -> None:
        super().__init__()
        if path is not None and Path(path).suffix != ".png":
            raise ValueError(f"RewardCurve(path={str(path)!r}) does not name a picture. End it in .png.")
        if not is_whole(window, 1):
            raise ValueError(f"RewardCurve(window={window!r}) is not a whole number from 1. Use 1 for no average.")
        self._target = RunPath("RewardCurve", path, "reward-curve.png")
        self._attempts = Attempts("RewardCurve")
        self._window = window
        self._training: Points = {}
        self._evaluation: Points = {}

    @property
    def training_points(self) -> Points:
        """Per turn, (`env_step`, mean reward) of each training step."""
        return self._training

    @property
    def evaluation_points(self) -> Points:
        """Per turn, (`env_step`, mean reward) of each evaluation."""
        return self._evaluation

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._target.settle(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._target.go_on(trainer)
        if trainer.ckpt_path is None and rollout_source(pl_module, self).env_step == 0:
            self._training, self._evaluation = {}, {}
            if trainer.is_global_zero and not is_rehearsal(trainer):
                with self._attempts.attempt():
                    self._target.warn_of_others([self._target.place])

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        source = rollout_source(pl_module, self)
        nodes = () if source.rollouts is None else source.rollouts.nodes
        rewards = gather_objects([(node.turn, node.rewards) for node in nodes])
        for turn in sorted({turn for turn, _ in rewards}):
            values = [value for at, node_rewards in rewards if at == turn for value in node_rewards]
            self._training.setdefault(turn, []).append((source.env_step, sum(values) / len(values)))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not has_fitted(trainer):
            return
        source, metrics = rollout_source(pl_module, self), evaluation_metrics(trainer)
        if trainer.state.fn != "fit" and any(step == source.env_step for step, _ in self._evaluation.get(1, ())):
            return
        for turn in range(1, source.num_turns + 1):
            key = f"{EVAL_PREFIX}turn_{turn}/reward_mean"
            if key in metrics:
                self._evaluation.setdefault(turn, []).append((source.env_step, metrics[key]))
        self._draw(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._draw(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"training": self._training, "evaluation": self._evaluation, **self._target.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._training = {turn: list(points) for turn, points in state_dict["training"].items()}
        self._evaluation = {turn: list(points) for turn, points in state_dict["evaluation"].items()}
        self._target.restore(state_dict)

    def _draw(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or is_rehearsal(trainer) or not (self._training or self._evaluation):
            return
        # Rewards may be larger than what a picture can scale.
        with self._attempts.attempt(ValueError, ArithmeticError):
            self._write()

    def _write(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for turn in sorted({*self._training, *self._evaluation}):
            self._draw_turn(axes, turn)
        axes.set(xlabel="env_step (joint completions scored)", ylabel="mean reward")
        axes.grid(alpha=0.3)
        axes.legend()
        self._target.place.write_whole(lambda path: figure.savefig(path))

    def _draw_turn(self, axes: Axes, turn: int) -> None:
        color = f"C{turn - 1}"
        if steps := self._training.get(turn):
            x, y = zip(*steps, strict=True)
            axes.plot(x, y, ".", color=color, alpha=0.25)
            axes.plot(x, moving_average(y, self._window), color=color, label=f"training, turn {turn}")
        if steps := self._evaluation.get(turn):
            x, y = zip(*steps, strict=True)
            axes.plot(x, y, "D--", color=color, markeredgecolor="black", label=f"evaluation, turn {turn}")


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` values before it."""
    spans = [values[max(0, stop - window) : stop] for stop in range(1, len(values) + 1)]
    return [sum(span) / len(span) for span in spans]
