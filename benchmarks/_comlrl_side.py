"""comlrl on one job. Runs in an environment of its own, without this package's dependencies."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
import transformers
from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
from comlrl.trainers.preference.madpo import MADPOConfig, MADPOTrainer
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from comlrl.trainers.reinforce.magrpo import NodeSample
from datasets import Dataset

from benchmarks._job import (
    RECORDED_TEXT,
    Done,
    Job,
    Measurement,
    external_transition,
    formatters,
    peak_bytes,
    read_job,
    recorded,
    report,
    reward_func,
    task_items,
)

WARM_UP_TOKENS = 4
UPDATES: dict[str, tuple[str, Callable[..., int]]] = {
    "magrpo": ("_update_from_samples", lambda agent, samples: sum(len(sample.returns) for sample in samples)),
    "iac": ("_update", lambda agent, samples: len(samples)),
    "maac": ("_update", lambda agent, samples: len(samples)),
    "madpo": ("_update_from_preference_batch", lambda pairs: sum(2 * len(pair.agent_tensors) for pair in pairs)),
}
"""Method of a trainer that learns, and how many completions its arguments hold."""


class Watch:
    """Counts and times what a trainer does, from outside."""

    def __init__(self, num_agents: int) -> None:
        self.num_agents = num_agents
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.generation_seconds = self.update_seconds = 0.0
        self.num_steps = self.num_joint = self.num_prompt_tokens = self.num_completion_tokens = self.num_trained = 0

    def reward(self, *completions: Sequence[str], batch_items: Sequence[Mapping[str, Any]]) -> list[float]:
        """The reward function, whose results are the joint completions."""
        rewards = reward_func(*completions, batch_items=batch_items)
        self.num_joint += len(rewards)
        return rewards

    def attach(self, trainer: Any, kind: str) -> None:
        """Stand before the methods of a trainer that sample and learn."""
        for agent in trainer.agents:
            agent.generate = self._generation(agent.generate)
        name, count = UPDATES.get(kind, UPDATES["magrpo"])
        setattr(trainer, name, self._update(getattr(trainer, name), count))
        for optimizer in trainer.agent_optimizers if kind in ("iac", "maac") else trainer.optimizers:
            optimizer.register_step_post_hook(self._count_step)

    def _generation(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def timed(**arguments: Any) -> Any:
            started = time.perf_counter()
            output = generate(**arguments)
            self.generation_seconds += time.perf_counter() - started
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            length = arguments["input_ids"].shape[1]
            self.num_prompt_tokens += length
            self.num_completion_tokens += sequences[:, length:].numel()
            return output

        return timed

    def _update(self, update: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self.num_trained += count(*arguments)
            started = time.perf_counter()
            result = update(*arguments)
            self.update_seconds += time.perf_counter() - started
            return result

        return timed

    def _count_step(self, *_: Any) -> None:
        self.num_steps += 1

    def done(self) -> Done:
        """What was counted."""
        tokens = self.num_prompt_tokens, self.num_completion_tokens
        return Done(self.num_steps // self.num_agents, self.num_joint, *tokens, self.num_trained)


def build_trainer(job: Job, watch: Watch) -> Any:
    """Load the agents; settings that only cost time (evaluation, filters of the sampler) are off."""
    work = job.work
    common = {
        "num_train_epochs": 1,
        "num_agents": work.num_agents,
        "max_new_tokens": work.num_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,  # None would mean 50, the default of `generate`
        "eval_interval": 0,
    }
    functions = {"reward_func": watch.reward, "formatters": formatters(work.num_agents)}
    data = {"train_dataset": Dataset.from_list(task_items(work.num_items)), "model_config": {"torch_dtype": job.dtype}}
    if work.kind in ("iac", "maac"):
        # The buffer counts the samples of one agent.
        size = work.items_per_update * work.num_generations
        config, kind = (IACConfig, IACTrainer) if work.kind == "iac" else (MAACConfig, MAACTrainer)
        settings = config(
            **common, num_generations=work.num_generations, num_turns=1, rollout_buffer_size=size, train_batch_size=size
        )
        return kind(agent_model=job.model, critic_model=job.model, args=settings, **functions, **data)
    own = {"agent_model": job.model, "num_agents": work.num_agents, **functions, **data}
    if work.kind == "madpo":
        settings = MADPOConfig(
            **common,
            preference_num_candidates=work.num_generations,
            preference_pairs_per_sample=2,
            pair_selection="reward_gap",
            train_batch_size=2 * work.items_per_update,
        )
        return MADPOTrainer(args=settings, **own)
    # The buffer counts the nodes of one agent; it is updated turn by turn.
    nodes = work.items_per_update * sum(work.num_generations**turn for turn in range(work.num_turns))
    settings = MAGRPOConfig(
        **common,
        num_generations=work.num_generations,
        num_turns=work.num_turns,
        early_termination_threshold=None,
        rollout_buffer_size=nodes,
        train_batch_size=nodes,
    )
    return MAGRPOTrainer(args=settings, external_transition=external_transition, **own)


def train(trainer: Any, job: Job) -> None:
    """Train end to end."""
    for agent in trainer.agents:
        model = agent.model if job.work.kind in ("iac", "maac") else agent
        model.generation_config.min_new_tokens = job.work.num_tokens
    trainer.train()


def generate(trainer: Any, job: Job, num_items: int, num_tokens: int) -> None:
    """Sample as the trainer does: one call per item and agent."""
    for item in task_items(num_items):
        for agent in range(job.work.num_agents):
            trainer._generate_completions_with_external_prompts(
                trainer.agents[agent],
                [item],
                agent_idx=agent,
                num_return_sequences=job.work.num_generations,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
            )


def update(trainer: Any, job: Job, watch: Watch, num_tokens: int) -> None:
    """Learn from recorded completions, agent by agent."""
    work = job.work
    watch.num_joint += work.num_items * work.num_generations
    for agent in range(work.num_agents):
        tokenizer = trainer.tokenizers[agent]
        text = tokenizer(RECORDED_TEXT, add_special_tokens=False).input_ids
        samples = []
        for position, item in enumerate(task_items(work.num_items)):
            prompt = tokenizer(trainer.formatters[agent](item), return_tensors="pt").input_ids
            completions = [
                torch.tensor(recorded(text, position, agent, sample, num_tokens))
                for sample in range(work.num_generations)
            ]
            data = {"prompt_input_ids": prompt, "completion_input_ids": [completions]}
            samples.append(NodeSample(agent, 0, data, [float(k) for k in range(work.num_generations)], 0.0, 0.0, 0))
            watch.num_prompt_tokens += prompt.shape[1]
            watch.num_completion_tokens += num_tokens * work.num_generations
        trainer._update_from_samples(agent, samples)


def main() -> None:
    """Run the job of standard input."""
    job = read_job()
    work = job.work
    random.seed(job.seed)
    torch.manual_seed(job.seed)
    watch = Watch(work.num_agents)
    trainer = build_trainer(job, watch)
    watch.attach(trainer, work.kind)
    if work.kind == "generate":
        generate(trainer, job, 1, WARM_UP_TOKENS)
    elif work.kind == "update":
        update(trainer, job, watch, WARM_UP_TOKENS)
    watch.clear()
    started = time.perf_counter()
    if work.kind == "generate":
        generate(trainer, job, work.num_items, work.num_tokens)
        watch.num_joint = work.num_items * work.num_generations
    elif work.kind == "update":
        update(trainer, job, watch, work.num_tokens)
    else:
        train(trainer, job)
    wall_seconds = watch.update_seconds if work.kind == "update" else time.perf_counter() - started
    seconds = (
        None if work.kind == "update" else watch.generation_seconds,
        None if work.kind == "generate" else watch.update_seconds,
    )
    versions = {"comlrl": version("comlrl"), "torch": torch.__version__, "transformers": transformers.__version__}
    report(Measurement(watch.done(), wall_seconds, *seconds, peak_bytes(), versions))


if __name__ == "__main__":
    main()
