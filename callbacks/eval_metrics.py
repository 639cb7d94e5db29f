"""The user's own evaluation metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.support import as_numbers, check_names, log_evaluation, rollout_source
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.metrics import evaluation_keys
from comlrl_lightning.types import Rollouts, RolloutSource
from comlrl_lightning.utilities.calls import UserFunction

LOGGER_KEYWORDS = ("agent_completions_turns", "batch_items", "prompts")


class EvalMetrics(Callback, KnownKeywords):
    """Add the user's metrics to every evaluation.

    `eval_logger(agent_completions_turns=..., batch_items=..., prompts=...)` is called once for the whole split and
    returns anything, usually one dictionary per item; `eval_aggregator(rows, num_turns=...)` turns that into scalars.
    A keyword is passed only if the function's signature has it.
    `agent_completions_turns` is `[agent][item][turn]` texts with ``""`` for turns that an item did not reach,
    `batch_items` the original task items, `prompts` one raw prompt per item: its field ``prompt``, or ``""``.

    Args:
        eval_logger: Measures the completions of the whole evaluation split.
        eval_aggregator: Makes a dictionary of numbers of the logger's answer; the prefix ``eval/`` is added.

    Raises:
        ValueError: If one of the two is missing or cannot be called like this.

    Example::

        def eval_logger(*, agent_completions_turns, batch_items, prompts):
            return [{"chars": len(turns[0])} for turns in agent_completions_turns[0]]

        def eval_aggregator(rows, *, num_turns):
            return {"chars": sum(row["chars"] for row in rows) / len(rows)}

        trainer = Trainer(callbacks=[EvalInterval(4), EvalMetrics(eval_logger, eval_aggregator)])
    """

    def __init__(self, eval_logger: Callable[..., Any], eval_aggregator: Callable[..., Mapping[str, float]]) -> None:
        super().__init__()
        for argument, function in (("eval_logger", eval_logger), ("eval_aggregator", eval_aggregator)):
            if function is None:
                raise ValueError(
                    f"EvalMetrics({argument}=None) has half of a pair. Pass both functions or no EvalMetrics."
                )
        self._eval_logger = UserFunction(eval_logger, "eval_logger", 0, LOGGER_KEYWORDS, "no positional arguments")
        self._eval_aggregator = UserFunction(
            eval_aggregator, "eval_aggregator", 1, ("num_turns",), "what eval_logger returned"
        )

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, pl_module)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, pl_module)

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source = rollout_source(pl_module, self)
        rollouts = source.evaluation_rollouts()
        # One rank asks the user's functions, so that all ranks decide by the same numbers.
        mine = self._measure(rollouts, source) if trainer.is_global_zero else {}
        metrics = trainer.strategy.broadcast(mine)
        log_evaluation(pl_module, metrics)

    def _measure(self, rollouts: Rollouts, source: RolloutSource) -> dict[str, float]:
        completions = completion_texts(rollouts, source.num_agents, source.num_turns)
        prompts = [item.get("prompt", "") for item in rollouts.items]
        place = f"the evaluation at env_step {source.env_step}"
        rows = self._eval_logger(
            place, agent_completions_turns=completions, batch_items=list(rollouts.items), prompts=prompts
        )
        returned = self._eval_aggregator(place, rows, num_turns=source.num_turns)
        metrics = as_numbers(returned, self._eval_aggregator.label)
        check_names(metrics, evaluation_keys(source.num_turns, with_kl=True), self._eval_aggregator.label)
        return metrics


def completion_texts(rollouts: Rollouts, num_agents: int, num_turns: int) -> list[list[list[str]]]:
    """`[agent][item][turn]` texts of an evaluation, ``""`` for turns that an item did not reach."""
    texts = [[[""] * num_turns for _ in rollouts.items] for _ in range(num_agents)]
    for node in rollouts.nodes:
        for agent, text in enumerate(node.answers(0)):
            texts[agent][node.task][node.turn - 1] = text
    return texts
