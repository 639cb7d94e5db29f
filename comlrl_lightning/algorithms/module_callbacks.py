"""Callbacks that every algorithm adds: exit codes after signals, metrics without an x-axis of their own."""

from __future__ import annotations

import signal
import traceback
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from comlrl_lightning.utilities.distributed import max_over_ranks


class TellWhatStopped(Callback):
    """Lets exit codes and errors tell who stopped a fit.

    A process that SIGTERM has stopped ends with the code that shells give for it, 143: Lightning leaves it at 0, so
    that ``train && evaluate`` would go on with half a training. Of several ranks, each says in its error which one it
    is, and those that only miss another one say so. They stop together, after the batch in which one got SIGTERM.
    """

    def __init__(self) -> None:
        self._got_sigterm = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._got_sigterm = False
        if trainer.world_size > 1:
            registered, lightning_own = signal.getsignal(signal.SIGTERM), trainer._signal_connector._sigterm_notifier_fn
            if isinstance(registered, _HandlersCompose) and lightning_own in registered.signal_handlers:
                place = registered.signal_handlers.index(lightning_own)
                registered.signal_handlers[place] = self._note_sigterm

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Only remember it.

        Lightning's own handler tells the other ranks at once, in the middle of whatever they do together, and waits for
        them: a second signal, or one that meets another rank in a collective, leaves all of them waiting.
        """
        self._got_sigterm = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.world_size > 1 and max_over_ranks(int(self._got_sigterm)):
            trainer._signal_connector.received_sigterm = True  # what Lightning looks at next, on every rank

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM
        if trainer.world_size > 1:
            place = f"This is rank {trainer.global_rank} of {trainer.world_size}"
            misses = "; another rank has ended before it, whose error says why" if _from_collective(exception) else ""
            exception.add_note(f"{place}{misses}.")


class ForgetStep(Callback):
    """Takes the x-axis of an evaluation out of the trainer's metrics once it has been logged.

    `ModelCheckpoint` would write it into the names of its files, in this evaluation and in all that follows.
    """

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer._results is not None:
            trainer._results.pop("on_validation_epoch_end.step", None)
        trainer.callback_metrics.pop("step", None)


def _from_collective(error: BaseException) -> bool:
    """Whether an error was raised by torch's communication between ranks."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals["__name__"]) if frames else ""
    return isinstance(error, RuntimeError) and module.startswith("torch.distributed")
