"""How a process ends whose training was stopped, by a signal or by another rank."""

from __future__ import annotations

import signal
import traceback

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override


class TellWhatStopped(Callback):
    """Lets exit codes and errors tell who stopped a fit.

    A process that SIGTERM has stopped ends with the code that shells give for it, 143: Lightning leaves it at 0, so
    that ``train && evaluate`` would go on with half a training. Of several ranks, each says in its error which one it
    is, and those that only miss another one say so.
    """

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM
        if trainer.world_size > 1:
            place = f"This is rank {trainer.global_rank} of {trainer.world_size}"
            misses = "; another rank has ended before it, whose error says why" if _from_collective(exception) else ""
            exception.add_note(f"{place}{misses}.")


def _from_collective(error: BaseException) -> bool:
    """Whether an error was raised by torch's communication between ranks."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals["__name__"]) if frames else ""
    return isinstance(error, RuntimeError) and module.startswith("torch.distributed")
