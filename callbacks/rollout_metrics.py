"""The user's own metrics over single completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.support import as_numbers, check_names, log_evaluation, rollout_source
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.metrics import evaluation_keys, training_keys
from comlrl_lightning.types import Node, Prompt, Rollouts, merge_rollouts
from comlrl_lightning.utilities.calls import UserFunction
from comlrl_lightning.utilities.distributed import gather_objects


@dataclass(frozen=True, slots=True)
class RolloutRecord(KnownKeywords):
    """One agent's part in one scored joint completion."""

    agent_idx: int
    """Index of the agent, from 0."""
    prompt: Prompt
    """The prompt as its formatter returned it."""
    completion: str
    """The agent's answer."""
    metadata: Mapping[str, Any]
    """`turn` (from 1), processed `reward`, original `item`, `item_index` in its dataset, `joint_index` in its node,
    `path` of joint completions that led there, `num_tokens` and `truncated` of the sampled completion, which is the
    whole one if one model writes the answers of all agents."""


class RolloutMetrics(Callback, KnownKeywords):
    """Log the user's metrics over rollout records, in training and in evaluation.

    In training `metrics_callback` gets the records of each training step, of all ranks in the order of the items, and
    its numbers are logged at once, whatever `logging_steps` says. In evaluation it gets the records of one item at a
    time, and the averages over items are logged with the prefix ``eval/``. It is called on rank zero only.

    Args:
        metrics_callback: Takes a list of `RolloutRecord` and returns a dictionary of numbers.

    Raises:
        ValueError: If `metrics_callback` cannot be called with one argument.

    Example::

        def metrics_callback(rollouts):
            return {"response_chars": sum(len(record.completion) for record in rollouts) / len(rollouts)}

        trainer = Trainer(callbacks=[RolloutMetrics(metrics_callback)])
    """

    def __init__(self, metrics_callback: Callable[[list[RolloutRecord]], Mapping[str, float]]) -> None:
        super().__init__()
        self._metrics_callback = UserFunction(metrics_callback, "metrics_callback", 1, (), "a list of records")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        source = rollout_source(pl_module, self)
        rollouts = merge_rollouts(gather_objects([] if source.rollouts is None else [source.rollouts]))
        own = training_keys(source.num_turns, source.num_agents, with_kl=True)
        mine: dict[str, float] = {}
        if trainer.is_global_zero and rollouts.nodes:
            mine = self._measure(rollout_records(rollouts), source.env_step, own)
        if logged := trainer.strategy.broadcast(mine):
            source.log_now(logged)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log_evaluation(trainer, pl_module)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_evaluation(trainer, pl_module)

    def _log_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source = rollout_source(pl_module, self)
        rollouts = source.evaluation_rollouts()
        mine: dict[str, float] = {}
        if trainer.is_global_zero:
            per_item: dict[int, list[Node]] = defaultdict(list)
            for node in rollouts.nodes:
                per_item[node.task].append(node)
            records = (rollout_records(rollouts, nodes) for nodes in per_item.values())
            own = evaluation_keys(source.num_turns, with_kl=True)
            mine = means(self._measure(item_records, source.env_step, own) for item_records in records)
        metrics = trainer.strategy.broadcast(mine)
        log_evaluation(pl_module, metrics)

    def _measure(self, records: list[RolloutRecord], env_step: int, own: list[str]) -> dict[str, float]:
        returned = self._metrics_callback(f"the records at env_step {env_step}", records)
        metrics = as_numbers(returned, self._metrics_callback.label)
        check_names(metrics, own, self._metrics_callback.label)
        return metrics


def rollout_records(rollouts: Rollouts, nodes: Sequence[Node] | None = None) -> list[RolloutRecord]:
    """One record per node, joint completion and agent, in this order, of `nodes` (all by default)."""
    return [
        RolloutRecord(
            agent_idx=agent,
            prompt=node.prompts[agent],
            completion=answer,
            metadata={
                "turn": node.turn,
                "reward": reward,
                "item": rollouts.items[node.task],
                "item_index": rollouts.indices[node.task],
                "joint_index": index,
                "path": node.path,
                "num_tokens": len(completion.token_ids),
                "truncated": completion.truncated,
            },
        )
        for node in (rollouts.nodes if nodes is None else nodes)
        for index, reward in enumerate(node.rewards)
        for agent, (answer, completion) in enumerate(zip(node.answers(index), node.sources(index), strict=True))
        if completion is not None
    ]


def means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each key over the rows that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            values[key].append(value)
    return {key: sum(column) / len(column) for key, column in values.items()}
