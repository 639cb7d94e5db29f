"""MAGRPO of comlrl on one job. Runs in an environment of its own, without this package's dependencies."""

from __future__ import annotations

import random
import time
from importlib.metadata import version
from typing import Any

import torch
import transformers
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset

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
from comlrl_lightning.tasks import length_ratio


class TimedTrainer(MAGRPOTrainer):  # type: ignore[misc]
    """Counts and times generation and updates from outside."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.generation_seconds = self.update_seconds = 0.0
        self.num_agent_updates = self.num_prompt_tokens = self.num_completion_tokens = 0

    def _generate_completions(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        started = time.perf_counter()
        data: dict[str, Any] = super()._generate_completions(*args, **kwargs)
        self.generation_seconds += time.perf_counter() - started
        self.num_prompt_tokens += data["prompt_input_ids"].shape[1]
        self.num_completion_tokens += sum(len(tokens) for tokens in data["completion_input_ids"][0])
        return data

    def _update_from_samples(self, agent_idx: int, samples: list[Any]) -> None:
        started = time.perf_counter()
        super()._update_from_samples(agent_idx, samples)
        self.update_seconds += time.perf_counter() - started
        self.num_agent_updates += 1


def build_trainer(job: Job) -> TimedTrainer:
    """Load the agents; settings that only cost time (evaluation, filters of the sampler) are off."""
    return TimedTrainer(
        agent_model=job.model,
        num_agents=NUM_AGENTS,
        model_config={"torch_dtype": job.dtype},
        train_dataset=Dataset.from_list(job.task_items()),
        reward_func=length_ratio.reward_func,
        formatters=FORMATTERS,
        args=MAGRPOConfig(
            num_train_epochs=1,
            num_agents=NUM_AGENTS,
            num_generations=NUM_GENERATIONS,
            num_turns=1,
            early_termination_threshold=None,
            max_new_tokens=job.num_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,  # None would mean 50, the default of `generate`
            eval_interval=0,
            rollout_buffer_size=job.items_per_update,
            train_batch_size=job.items_per_update,
        ),
    )


def main() -> None:
    """Run the job of standard input."""
    job = read_job()
    random.seed(job.seed)
    torch.manual_seed(job.seed)
    trainer = build_trainer(job)
    started = time.perf_counter()
    trainer.train(min_new_tokens=job.num_tokens)
    wall_seconds = time.perf_counter() - started
    work = Work(
        trainer.num_agent_updates // NUM_AGENTS,
        trainer.env_step,
        trainer.num_prompt_tokens,
        trainer.num_completion_tokens,
    )
    versions = {"comlrl": version("comlrl"), "torch": torch.__version__, "transformers": transformers.__version__}
    report(Measurement(work, wall_seconds, trainer.generation_seconds, trainer.update_seconds, peak_bytes(), versions))


if __name__ == "__main__":
    main()
