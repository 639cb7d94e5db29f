"""This package on one job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

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
from comlrl_lightning import (
    IAC,
    MAAC,
    MADPO,
    MAGRPO,
    AdapterCritic,
    CooperativeModule,
    ModelCritic,
    Sampling,
    Separate,
    SharedBase,
    TaskDataModule,
)
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.rollouts.collect import Collector
from comlrl_lightning.types import Completion, Node, Rollouts

WARM_UP_TOKENS = 4


class Recorded(MAGRPO):
    """MAGRPO that learns from recorded completions and samples none; its first batch is a warm-up with short ones."""

    num_tokens: int = 1
    """Tokens of every completion after the warm-up."""

    @override
    def collect(self, batch: TaskBatch, *args: Any, **kwargs: Any) -> Rollouts:
        count = WARM_UP_TOKENS if batch.start == 0 else self.num_tokens
        nodes = tuple(self._node(position, item, count) for position, item in enumerate(batch.items))
        return Rollouts(tuple(batch.items), tuple(batch.indices), nodes)

    def _node(self, position: int, item: Mapping[str, Any], count: int) -> Node:
        num_generations, agents = self.shape.num_generations, range(self.num_agents)
        prompts = tuple(self.task_functions.formatters.format(item, agent) for agent in agents)
        groups = tuple(
            tuple(self._completion(position, agent, sample, prompts[agent], count) for sample in range(num_generations))
            for agent in agents
        )
        joint = tuple((sample,) * self.num_agents for sample in range(num_generations))
        return Node(position, 1, (), None, prompts, groups, joint, tuple(map(float, range(num_generations))))

    def _completion(self, item: int, agent: int, sample: int, prompt: Any, count: int) -> Completion:
        text = self.team.speaker(agent).tokenizer(RECORDED_TEXT, add_special_tokens=False).input_ids
        tokens = tuple(recorded(text, item, agent, sample, count))
        return Completion(agent, prompt, self.team.encode(agent, prompt), tokens, (0.0,) * count, "", truncated=True)


class Watch(Callback):
    """Counts and times generation and updates from outside.

    Args:
        num_warm_up: Batches that do not count.
    """

    def __init__(self, num_warm_up: int = 0) -> None:
        self.num_warm_up = num_warm_up
        self.generation_seconds = self.update_seconds = 0.0
        self.num_updates = self.num_joint = self.num_prompt_tokens = self.num_completion_tokens = self.num_trained = 0
        self._update_step = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, CooperativeModule)
        steps = pl_module.update_step - self._update_step
        self._update_step = pl_module.update_step
        if batch_idx < self.num_warm_up:
            return
        if pl_module.rollouts is not None:
            self.read(pl_module.rollouts)
        if steps:
            self.num_updates += steps
            self.update_seconds += float(trainer.callback_metrics["time/update"])
            self.num_trained += _num_trained(pl_module, trainer.callback_metrics)

    def read(self, rollouts: Rollouts) -> None:
        """Count what was sampled."""
        self.generation_seconds += rollouts.generation_seconds
        self.num_joint += rollouts.num_scored
        prompts = {}
        for node in rollouts.nodes:
            for agent, group in enumerate(node.completions):
                prompts[node.task, node.parent, agent] = len(group[0].prompt_ids)  # trajectories share their first one
                self.num_completion_tokens += sum(len(completion.token_ids) for completion in group)
        self.num_prompt_tokens += sum(prompts.values())

    def done(self) -> Done:
        """What was counted."""
        tokens = self.num_prompt_tokens, self.num_completion_tokens
        return Done(self.num_updates, self.num_joint, *tokens, self.num_trained)


def _num_trained(module: CooperativeModule, metrics: Mapping[str, Any]) -> int:
    """Completions that entered the loss of the last update, which leaves out groups without any advantage."""
    if isinstance(module, MADPO):
        return 2 * module.num_agents * len(module.rounds.pairs)
    assert module.rollouts is not None
    completions = sum(len(group) for node in module.rollouts.nodes for group in node.completions)
    shares = [float(metrics[f"agent_{agent}/zero_advantage_share"]) for agent in range(module.num_agents)]
    return round(completions * (1 - sum(shares) / module.num_agents))


def build_module(job: Job) -> CooperativeModule:
    """Load the agents."""
    work = job.work
    assert job.micro_batch_tokens is not None
    common: dict[str, Any] = {
        "agents": Separate([job.model] * work.num_agents, dtype=job.dtype)
        if job.full
        else SharedBase(job.model, num_agents=work.num_agents, dtype=job.dtype),
        "reward_func": reward_func,
        "formatters": formatters(work.num_agents),
        "sampling": Sampling(max_new_tokens=work.num_tokens, min_new_tokens=work.num_tokens),
        "micro_batch_tokens": job.micro_batch_tokens,
        "seed": job.seed,
    }
    module: CooperativeModule
    if work.kind == "madpo":
        pairs: dict[str, Any] = {"pair_selection": "reward_gap", "num_pairs_per_item": 2}
        module = MADPO(**common, num_candidates=work.num_generations, **pairs)
    elif work.kind in ("iac", "maac"):
        critic = ModelCritic(job.model) if job.full else AdapterCritic()
        kind = IAC if work.kind == "iac" else MAAC
        module = kind(**common, num_generations=work.num_generations, critic=critic)
    else:
        transition = external_transition if work.num_turns > 1 else None
        turns: dict[str, Any] = {"num_turns": work.num_turns, "external_transition": transition}
        kinds = Recorded if work.kind == "update" else MAGRPO
        module = kinds(**common, num_generations=work.num_generations, **turns)
    if isinstance(module, Recorded):
        module.num_tokens = work.num_tokens
    module.configure_model()
    return module


def fit(module: CooperativeModule, job: Job) -> tuple[Watch, float]:
    """Train; return what was counted, and the seconds of all or, of recorded completions, of the update alone."""
    work = job.work
    watch = Watch(num_warm_up=int(work.kind == "update"))
    trainer = Trainer(
        max_epochs=module.epochs_per_round if isinstance(module, MADPO) else 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[watch],
    )
    items = task_items(work.num_items) * (1 + watch.num_warm_up)
    started = time.perf_counter()
    trainer.fit(module, TaskDataModule(items, batch_size=work.items_per_update))
    wall_seconds = time.perf_counter() - started
    return watch, watch.update_seconds if work.kind == "update" else wall_seconds


def generate(module: CooperativeModule, job: Job) -> tuple[Watch, float]:
    """Sample for all items and agents at once, as training does; return what was counted, and its seconds."""
    items = task_items(job.work.num_items)
    watch = Watch()
    short = replace(module.sampling, max_new_tokens=WARM_UP_TOKENS, min_new_tokens=WARM_UP_TOKENS)
    for count, sampling in ((1, short), (len(items), module.sampling)):
        collector = Collector(module.team, module.task_functions, module.shape, sampling, (job.seed,))
        rollouts = collector.collect(items[:count], range(count))
    watch.read(rollouts)
    return watch, watch.generation_seconds


def main() -> None:
    """Run the job of standard input."""
    job = read_job()
    module = build_module(job)
    watch, wall_seconds = (generate if job.work.kind == "generate" else fit)(module, job)
    seconds = (
        None if job.work.kind == "update" else watch.generation_seconds,
        None if job.work.kind == "generate" else watch.update_seconds,
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report(Measurement(watch.done(), wall_seconds, *seconds, peak_bytes(), versions))


if __name__ == "__main__":
    main()
