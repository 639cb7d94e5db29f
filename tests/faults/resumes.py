"""Runs that stop in every way and go on from every kind of checkpoint, beside one that never stopped."""

from __future__ import annotations

import hashlib
import random
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, Timer

from comlrl_lightning import MAAC, MADPO, MAGRPO, MARLHF, Sampling, SharedBase, TaskDataModule
from comlrl_lightning.algorithms import CooperativeModule
from comlrl_lightning.callbacks import BatchCheckpoint, EvalInterval
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.data.datamodule import TaskBatch
from tests.algorithms.support import ENDS, LORA, make_trainer, uneven_reward
from tests.tiny_lm import tiny_llama, tiny_tokenizer

ITEMS = [{"prompt": text} for text in ("hi", "there", "you", "all", "!")]
BATCHES = 3
"""Batches of an epoch: two items, two items, one."""
EVALUATION = "eval/final_reward_mean"
Family = Literal["MAGRPO", "MAAC", "MADPO", "MARLHF"]
Place = Literal["first", "middle", "last", "evaluation"]
"""A batch of an epoch, or the evaluation before its second batch."""


class PowerCut(Exception):
    """An error, or the end of a process."""


def noisy_reward(*completions: list[str]) -> list[float]:
    """A reward that draws from the global random state."""
    noise = random.random()
    return [reward + noise * place for place, reward in enumerate(uneven_reward(*completions))]


def make(family: Family) -> CooperativeModule:
    """A module of each family, with a buffer that an update empties now and then."""
    model = tiny_llama(num_hidden_layers=1)
    model.generation_config.eos_token_id = ENDS
    common: dict[str, Any] = {
        "agents": SharedBase(model, num_agents=2, lora=LORA, tokenizer=tiny_tokenizer()),
        "reward_func": noisy_reward,
        "sampling": Sampling(max_new_tokens=3),
        "agent_learning_rate": 1e-2,
        "logging_steps": 10**6,  # logs take a good part of so small a run
    }
    if family == "MAGRPO":
        return MAGRPO(**common, num_generations=2, rollout_buffer_size=3, train_batch_size=2, clip_epsilon=0.2)
    if family == "MAAC":
        return MAAC(**common)
    if family == "MADPO":
        return MADPO(**common, num_candidates=3, train_batch_size=2)
    return MARLHF(
        **common, num_candidates=3, num_generations=2, reward_model=JointRewardModel(num_epochs=1, batch_size=2)
    )


EPOCHS: dict[Family, int] = {"MAGRPO": 4, "MAAC": 4, "MADPO": 4, "MARLHF": 6}
"""Two rounds of the preference algorithms."""


@dataclass(frozen=True)
class Step:
    """What a training step leaves behind."""

    epoch: int
    items: tuple[int, ...]
    env_step: int
    update_step: int
    weights: str


class Watch(Callback):
    """Keeps every training step, and after which of them there was an evaluation."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.evaluations: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TaskBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, CooperativeModule)
        counts = pl_module.env_step, pl_module.update_step
        self.steps.append(Step(batch.epoch, tuple(batch.indices), *counts, digest(pl_module)))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.evaluations.append(len(self.steps))


def digest(module: CooperativeModule) -> str:
    """The trained weights, to the last bit."""
    values = [value.detach().numpy().tobytes() for value in module.parameters() if value.requires_grad]
    return hashlib.sha1(b"".join(values)).hexdigest()


@dataclass
class Goal:
    """Where a run is to stop."""

    batches: int
    """Batches over all epochs that are trained then."""
    in_evaluation: bool = False

    def is_here(self, trainer: Trainer) -> bool:
        """Whether that many are trained."""
        return bool(trained(trainer) >= self.batches)


def trained(trainer: Trainer) -> int:
    """Batches that were trained, over all epochs."""
    loop: Any = trainer.fit_loop
    return int(loop._combined_loader.flattened[0].sampler.now.batches)


class Stopper(Callback):
    """Ends a run at a goal."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal

    def end(self, trainer: Trainer) -> None:
        """Do it."""
        raise NotImplementedError

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.goal.in_evaluation and self.goal.is_here(trainer):
            self.end(trainer)


class AfterBatch(Stopper):
    """Ends it when the batch is trained."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self.goal.is_here(trainer):
            self.end(trainer)


class BeforeBatch(Stopper):
    """Ends it when the next batch is about to begin."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.goal.is_here(trainer):
            self.end(trainer)


class ShouldStop(AfterBatch):
    """As a user's callback may do."""

    def end(self, trainer: Trainer) -> None:
        trainer.should_stop = True


class Interrupted(AfterBatch):
    """Ctrl-C when the batch is over."""

    def end(self, trainer: Trainer) -> None:
        raise KeyboardInterrupt


class InterruptedBetween(BeforeBatch):
    """Ctrl-C when the next one has begun."""

    def end(self, trainer: Trainer) -> None:
        raise KeyboardInterrupt


class Killed(BeforeBatch):
    """The end of the process, without any hook."""

    def end(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_exception = lambda *args: None
        raise PowerCut


class FailsEarly(Stopper):
    """An error in the step that follows, when everything is collected and nothing is learned."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        if self.goal.is_here(trainer):
            collect = pl_module.train_on

            def fail(*args: Any) -> None:
                vars(pl_module)["optimizer_step_on"] = self.raise_error
                collect(*args)
                self.raise_error()

            vars(pl_module)["train_on"] = fail

    def raise_error(self, *args: Any) -> None:
        raise PowerCut

    def end(self, trainer: Trainer) -> None:
        raise PowerCut


class FailsLate(Stopper):
    """An error at the end of the step that follows, when its optimizer steps are taken."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        if self.goal.is_here(trainer):
            train = pl_module.train_on

            def fail(*args: Any) -> None:
                train(*args)
                raise PowerCut

            vars(pl_module)["train_on"] = fail

    def end(self, trainer: Trainer) -> None:
        raise PowerCut


class TimeIsUp(Timer):
    """Lightning's `max_time`, whose clock follows the batches."""

    def __init__(self, goal: Goal) -> None:
        super().__init__(duration={"hours": 1})
        self.goal = goal
        self.trainer: Trainer | None = None

    def on_fit_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.trainer = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer = trainer

    def time_elapsed(self, stage: Any = None) -> float:
        return 1e9 if self.trainer is not None and self.goal.is_here(self.trainer) else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.goal.in_evaluation:
            self._check_time_remaining(trainer)


class NoBetter(EarlyStopping):
    """Early stopping at an evaluation, which its threshold ends."""

    def __init__(self, goal: Goal) -> None:
        super().__init__(EVALUATION, mode="max", stopping_threshold=-1e9)
        self.goal = goal

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.goal.is_here(trainer):
            super().on_validation_end(trainer, pl_module)


def steps_limit(goal: Goal, whole: Whole) -> dict[str, Any]:
    """The first number of optimizer steps that is not reached before the goal."""
    before = whole.steps[goal.batches - 2].update_step if goal.batches > 1 else 0
    return {"max_steps": next(step.update_step for step in whole.steps if step.update_step > before)}


@dataclass(frozen=True)
class Stop:
    """A way to end a run."""

    name: str
    callback: Callable[[Goal], Callback] | None = None
    settings: Callable[[Goal, Whole], dict[str, Any]] = lambda goal, whole: {}
    always: dict[str, Any] = field(default_factory=dict)
    """Settings of the trainer in all runs, the unbroken one among them."""
    inside: bool = False
    """It comes in the step after the batch that is named, counted from 0."""

    def __hash__(self) -> int:
        return hash(self.name)


STOPS = (
    Stop("`max_steps`", settings=steps_limit),
    Stop("`max_time`", TimeIsUp),
    Stop("`should_stop`", ShouldStop),
    Stop("`EarlyStopping`", NoBetter),
    Stop("`limit_train_batches=2` and `should_stop`", ShouldStop, always={"limit_train_batches": 2}),
    Stop("Ctrl-C at the end of a batch", Interrupted),
    Stop("Ctrl-C before a batch", InterruptedBetween),
    Stop("an error in a step, before its update", FailsEarly, inside=True),
    Stop("an error in a step, after its update", FailsLate, inside=True),
    Stop("a killed process", Killed),
)


KINDS: dict[str, Callable[[Path], Callback]] = {
    "`BatchCheckpoint(2)`": lambda folder: BatchCheckpoint(2, keep=None, dirpath=folder),
    "`ModelCheckpoint(every_n_train_steps=1)`": lambda folder: ModelCheckpoint(
        folder, save_top_k=-1, every_n_train_steps=1
    ),
    "`ModelCheckpoint()`, by epoch": lambda folder: ModelCheckpoint(folder, save_top_k=-1),
    "`ModelCheckpoint(monitor=...)`": lambda folder: ModelCheckpoint(folder, monitor=EVALUATION, save_top_k=-1),
    "`ModelCheckpoint(save_last=True)`": lambda folder: ModelCheckpoint(folder, save_last=True),
    "`ModelCheckpoint(save_on_exception=True)`": lambda folder: ModelCheckpoint(folder, save_on_exception=True),
    "`OnExceptionCheckpoint`": lambda folder: OnExceptionCheckpoint(folder),
}


@dataclass
class Whole:
    """The run that never stopped."""

    steps: list[Step]
    evaluations: list[int]


@dataclass
class Part:
    """A run that began, or went on, and ended."""

    steps: list[Step]
    evaluations: list[int]
    trained: int
    """Batches that were trained at its end, over all parts."""


def run(
    family: Family,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Path | None = None,
    seed: int = 0,
    ranks: int = 1,
    **settings: Any,
) -> Part:
    """Train, from the start or from a checkpoint, until it ends or is ended."""
    random.seed(seed)
    watch = Watch()
    several: dict[str, Any] = {} if ranks == 1 else {"strategy": "ddp", "devices": ranks}
    everything = {"max_epochs": EPOCHS[family], "enable_checkpointing": True, **several, **settings}
    trainer = make_trainer([EvalInterval(3), watch, *callbacks], **everything)
    data = TaskDataModule(ITEMS, ITEMS[:1], batch_size=2 // ranks, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(make(family), data, ckpt_path=ckpt_path)
        except (PowerCut, KeyboardInterrupt, SystemExit):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored
    return Part(watch.steps, watch.evaluations, trained(trainer))


@cache
def whole_run(family: Family, always: tuple[tuple[str, Any], ...], ranks: int = 1) -> Whole:
    """The unbroken run, under the settings that all of its parts have."""
    part = run(family, ranks=ranks, **{**dict(always), "enable_checkpointing": False})
    assert part.steps[-1].epoch == EPOCHS[family] - 1, "something has ended the unbroken run"
    return Whole(part.steps, part.evaluations)


def goal_at(place: Place, epoch: int, length: int, inside: bool) -> Goal:
    """The goal in an epoch of so many batches; a stop inside of a step comes one batch earlier."""
    number = {"first": 1, "middle": 2 if length > 2 else 1, "last": length, "evaluation": 1}[place]
    early = inside and place != "evaluation"
    return Goal(epoch * length + number - early, place == "evaluation")


def saved_at(checkpoint: Path | None) -> tuple[int, bool]:
    """Batches that were trained when a checkpoint was saved, and whether the evaluation that follows them was over."""
    if checkpoint is None:
        return 0, False
    content = torch.load(checkpoint, weights_only=True)
    (position,) = content["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return position["batches"], content["callbacks"]["EvalInterval"]["finished"] is not None


def newest(folder: Path) -> Path | None:
    """The checkpoint that was saved last."""
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)


def check_chain(
    family: Family, stop: Stop, kind: str, places: Sequence[Place], folder: Path, ranks: int = 1
) -> list[str]:
    """Stop a run in as many epochs as there are places, go on each time, and compare every part with the unbroken run.

    Returns:
        What became of each resumption: "equal", "anew" where nothing had been saved, or "refused".
    """
    whole = whole_run(family, tuple(stop.always.items()), ranks)
    length = int(stop.always.get("limit_train_batches", BATCHES))
    goals: list[Goal | None] = [goal_at(place, epoch, length, stop.inside) for epoch, place in enumerate(places)]
    came: list[str] = []
    start: Path | None = None
    for number, goal in enumerate([*goals, None]):
        callbacks: list[Callback] = [KINDS[kind](folder)]
        settings: dict[str, Any] = dict(stop.always)
        if goal is not None:
            callbacks += [] if stop.callback is None else [stop.callback(goal)]
            settings |= stop.settings(goal, whole)
        first, evaluated = saved_at(start)
        try:
            part = run(family, callbacks, start, seed=number if start else 0, ranks=ranks, **settings)
        except ValueError as error:
            if "inside an update, after one of its optimizer steps" not in str(error):
                raise
            return [*came, "refused"]
        check_part(part, whole, first, evaluated)
        if goal is None:
            assert first + len(part.steps) == len(whole.steps)
        start = newest(folder)
        came.append("anew" if start is None else "equal")
    return came[:-1]


def check_part(part: Part, whole: Whole, first: int, evaluated: bool) -> None:
    """A part trained what the unbroken run has trained from there on, and evaluated when that did."""
    end = first + len(part.steps)
    assert part.steps == whole.steps[first:end]
    assert part.trained == end
    evaluations = [first + number for number in part.evaluations]
    between = [number for number in whole.evaluations if first < number < end]
    assert [number for number in evaluations if first < number < end] == between
    at_first = int(first in whole.evaluations and not evaluated)
    assert evaluations.count(first) == at_first or (end == first and evaluations.count(first) <= at_first)
    assert evaluations.count(end) <= 1
