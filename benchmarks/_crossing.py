"""Which files of the package one training step crosses."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, Trainer

from benchmarks._source import shown
from comlrl_lightning import MAGRPO, LoraSettings, Sampling, SharedBase, TaskDataModule
from tests.tiny_lm import tiny_llama, tiny_tokenizer


class Crossing:
    """Counts the calls that enter files of the package, and from which file to which.

    A file is crossed when a function or method that is written in it is called, by whatever code; a generator counts
    whenever it goes on. What runs in other threads does not count, nor does what an import executes.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [str(folder.resolve()) for folder in folders]
        self.files: Counter[str] = Counter()
        """Calls into each file."""
        self.moves: Counter[tuple[str, str]] = Counter()
        """Calls from the code of one file into another one, with other libraries in between or not."""
        self._known: dict[str, str] = {}

    def start(self) -> None:
        """Count from now on."""
        sys.setprofile(self._event)

    def stop(self) -> None:
        """Count no more."""
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code.co_name == "<module>" or not (path := self._own(frame)):
            return
        self.files[path] += 1
        caller = frame.f_back
        while caller is not None and not self._own(caller):
            caller = caller.f_back
        if caller is not None and (origin := self._own(caller)) != path:
            self.moves[origin, path] += 1

    def _own(self, frame: FrameType) -> str:
        """The file of a frame; "" outside of the package."""
        name = frame.f_code.co_filename
        if name not in self._known:
            path = str(Path(name).resolve()) if name.endswith(".py") else ""
            self._known[name] = shown(Path(path)) if path.startswith(tuple(self.folders)) else ""
        return self._known[name]


class SecondStep(Callback):
    """Counts from the end of the first training step to that of the second."""

    def __init__(self, crossing: Crossing) -> None:
        self.crossing = crossing

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.crossing.start()
        elif batch_idx == 1:
            self.crossing.stop()


def crossed_by_a_step(folders: Sequence[Path]) -> Crossing:
    """What one training step of MAGRPO crosses: two agents on one model, one turn, no workers, an update per step.

    It is the second of three steps, from the end of the first one, so that nothing is done for the first time: the
    loader goes on to the next item, the team answers, the reward is asked for, the optimizer takes a step.

    Args:
        folders: Where the files of the package are.
    """
    crossing = Crossing(folders)

    agents = SharedBase(tiny_llama(), num_agents=2, lora=LoraSettings(rank=2), tokenizer=tiny_tokenizer())
    sampling = Sampling(max_new_tokens=4, min_new_tokens=4)
    module = MAGRPO(agents, _letters, num_generations=2, sampling=sampling)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SecondStep(crossing)],
    )
    trainer.fit(module, TaskDataModule([{"prompt": text} for text in ("hi", "there", "you")]))
    if trainer.global_step != 3:
        raise ValueError(f"{trainer.global_step} optimizer steps were taken, not 3. Choose another seed.")
    return crossing


def _letters(*completions: list[str]) -> list[float]:
    """Rewards that differ."""
    return [sum(map(len, joint)) + sum(map(ord, "".join(joint))) % 7 for joint in zip(*completions, strict=True)]
