"""How much of a training step of MAGRPO is spent outside of the language model: sampling tokens, Python, texts.

    python -m benchmarks.outside --model SmolLM2-135M-Instruct

times the forward passes of the transformer body and of the head, the backward passes and the optimizer of one step (32
completions of 64 tokens: 4 items, 2 agents, K=4) and prints what is left. A step before it warms up.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from benchmarks._job import formatters, reward_func, task_items
from benchmarks._model import DEFAULT_MODEL, model_folder
from benchmarks._report import table
from benchmarks._works import MICRO_BATCH_TOKENS
from comlrl_lightning import MAGRPO, Sampling, SharedBase, TaskDataModule
from comlrl_lightning.agents.team import TokenScores

NUM_ITEMS = 4
PARTS = ("body, sampling", "head, sampling", "log-probabilities, update", "backward", "optimizer")
"""What counts as inside. The log-probabilities of an update are the forward passes of body and head up to the loss."""


class Clock:
    """Seconds and calls by part. Of parts inside of each other only the outermost counts."""

    def __init__(self) -> None:
        self._depth = 0
        self._started = 0.0
        self.clear()

    def clear(self) -> None:
        """Begin again, outside of all parts."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.calls = dict.fromkeys(PARTS, 0)

    def enter(self) -> None:
        """Begin a part."""
        if self._depth == 0:
            self._started = time.perf_counter()
        self._depth += 1

    def leave(self, part: str) -> None:
        """End it."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds[part] += time.perf_counter() - self._started
            self.calls[part] += 1

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time a block."""
        self.enter()
        yield
        self.leave(part)

    def watch(self, module: nn.Module, name: str) -> None:
        """Time the forward passes of a module outside of other parts."""
        module.register_forward_pre_hook(lambda *_: self.enter())
        module.register_forward_hook(lambda *_: self.leave(name))


class TimedMAGRPO(MAGRPO):
    """MAGRPO with its backward passes and its optimizer timed."""

    clock: Clock = field(init=False)

    @override
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.clock.timed("backward"):
            super().manual_backward(loss, *args, **kwargs)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.register_step_pre_hook(lambda *_: self.clock.enter())
        optimizer.register_step_post_hook(lambda *_: self.clock.leave("optimizer"))
        return optimizer


class Steps(Callback):
    """Keeps the wall time of the last training step, and its parts alone."""

    def __init__(self) -> None:
        self.wall_seconds = self._started = 0.0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, TimedMAGRPO)
        pl_module.clock.clear()
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.wall_seconds = time.perf_counter() - self._started


def step(model: str, dtype: str, num_tokens: int) -> tuple[Clock, float]:
    """Run two training steps; return the clock and the wall time of the second.

    Args:
        model: Folder.
        dtype: Number format of the frozen base.
        num_tokens: Tokens of every completion.

    Raises:
        RuntimeError: If a part was never seen: the model is called in another way than this looks at.
    """
    module = TimedMAGRPO(
        agents=SharedBase(model, num_agents=2, dtype=dtype),
        reward_func=reward_func,
        formatters=formatters(2),
        num_generations=4,
        sampling=Sampling(max_new_tokens=num_tokens, min_new_tokens=num_tokens),
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    module.clock = Clock()
    module.configure_model()
    (language_model,) = module.team.language_models()
    module.clock.watch(language_model.causal.base_model, "body, sampling")
    module.clock.watch(language_model.causal.get_output_embeddings(), "head, sampling")
    log_probs = module.team.log_probs

    def timed(*args: Any, **kwargs: Any) -> TokenScores:
        with module.clock.timed("log-probabilities, update"):
            return log_probs(*args, **kwargs)

    module.team.log_probs = timed  # type: ignore[method-assign]
    steps = Steps()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[steps],
    )
    trainer.fit(module, TaskDataModule(task_items(2 * NUM_ITEMS), batch_size=NUM_ITEMS))
    unseen = [part for part, count in module.clock.calls.items() if not count]
    if unseen:
        raise RuntimeError(f"Never called: {', '.join(unseen)}. Their time would count as outside of the model.")
    return module.clock, steps.wall_seconds


def report(clock: Clock, wall_seconds: float) -> str:
    """Return the table and the share of the wall time that is outside.

    Args:
        clock: Of one step.
        wall_seconds: Of the same step.
    """
    outside = wall_seconds - sum(clock.seconds.values())
    lines = [
        [part, str(clock.calls[part]), f"{seconds:.2f}", f"{100 * seconds / wall_seconds:.1f}%"]
        for part, seconds in clock.seconds.items()
    ]
    lines.append(["outside", "", f"{outside:.2f}", f"{100 * outside / wall_seconds:.1f}%"])
    lines.append(["all", "", f"{wall_seconds:.2f}", "100.0%"])
    return table(["part", "calls", "s", "share"], lines)


def main() -> None:
    """Read the command line, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or folder")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the frozen base")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every completion")
    options = parser.parse_args()
    print(report(*step(str(model_folder(options.model)), options.dtype, options.tokens)))


if __name__ == "__main__":
    main()
