"""MAGRPO of this package on one job."""

from __future__ import annotations

import time

import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from benchmarks._job import (
    FORMATTERS,
    NUM_AGENTS,
    NUM_GENERATIONS,
    Job,
    Measurement,
    Work,
    peak_bytes,
    read_job,
    report,
)
from comlrl_lightning import MAGRPO, Sampling, Separate, SharedBase, TaskDataModule
from comlrl_lightning.rollouts.types import RolloutSource
from comlrl_lightning.tasks import length_ratio


class Counts(Callback):
    """Counts and times generation and updates from outside."""

    def __init__(self) -> None:
        self.generation_seconds = self.update_seconds = 0.0
        self.num_prompt_tokens = self.num_completion_tokens = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, RolloutSource)
        assert pl_module.rollouts is not None
        self.generation_seconds += pl_module.rollouts.generation_seconds
        self.update_seconds += float(trainer.callback_metrics["time/update"])
        for group in (group for node in pl_module.rollouts.nodes for group in node.completions):
            self.num_prompt_tokens += len(group[0].prompt_ids)
            self.num_completion_tokens += sum(len(completion.token_ids) for completion in group)


def build_module(job: Job) -> MAGRPO:
    """Load the agents."""
    module = MAGRPO(
        agents=Separate([job.model] * NUM_AGENTS, dtype=job.dtype)
        if job.full
        else SharedBase(job.model, num_agents=NUM_AGENTS, dtype=job.dtype),
        reward_func=length_ratio.reward_func,
        formatters=FORMATTERS,
        num_generations=NUM_GENERATIONS,
        sampling=Sampling(max_new_tokens=job.num_tokens, min_new_tokens=job.num_tokens),
        micro_batch_tokens=1024,
        seed=job.seed,
    )
    module.configure_model()
    return module


def main() -> None:
    """Run the job of standard input."""
    job = read_job()
    module, counts = build_module(job), Counts()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[counts],
    )
    started = time.perf_counter()
    trainer.fit(module, TaskDataModule(job.task_items(), batch_size=job.items_per_update))
    wall_seconds = time.perf_counter() - started
    work = Work(module.update_step, module.env_step, counts.num_prompt_tokens, counts.num_completion_tokens)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report(Measurement(work, wall_seconds, counts.generation_seconds, counts.update_seconds, peak_bytes(), versions))


if __name__ == "__main__":
    main()
