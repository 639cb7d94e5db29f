"""The texts of an evaluation, to be read."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from comlrl_lightning.callbacks.history import History
from comlrl_lightning.callbacks.run_path import Attempts, RunPath
from comlrl_lightning.callbacks.support import (
    has_fitted,
    is_rehearsal,
    may_print,
    outside_of_fit,
    rollout_source,
)
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.reports import say
from comlrl_lightning.types import Rollouts, prompt_text


class CompletionsTable(Callback, KnownKeywords):
    """Write the joint completions of every evaluation: to JSON lines, to Weights & Biases, and a few on screen.

    A line of the file (and a row of the W&B table ``eval/completions``) is one item at one turn: `env_step`, `index` of
    the item, `turn`, `prompts` and `completions` per agent, `reward`; in the file also `batch`, the number of batches
    trained before. An evaluation by the trainer after its fit takes the place of the lines that were written after the
    same batch; a trainer that never fitted writes ``completions-validate.jsonl`` (or ``-test``) instead. A
    `fast_dev_run` writes nothing. Neither a disk that takes no file nor a screen that shows no text ends a run.

    Args:
        path: The JSON-lines file, or an address such as ``s3://bucket/completions.jsonl`` that fsspec reaches; None
            takes ``completions.jsonl`` in the folder of the run.
        num_on_screen: Items shown on screen, with all their turns, at each evaluation; 0 shows none.

    Raises:
        ValueError: If `num_on_screen` is negative or `path` does not end in ``.jsonl``.

    Example::

        trainer = Trainer(callbacks=[EvalInterval(4), CompletionsTable(num_on_screen=2)])
    """

    def __init__(self, path: str | Path | None = None, num_on_screen: int = 3) -> None:
        super().__init__()
        if path is not None and Path(path).suffix != ".jsonl":
            raise ValueError(f"CompletionsTable(path={str(path)!r}) does not name JSON lines. End it in .jsonl.")
        if num_on_screen < 0:
            raise ValueError(
                f"CompletionsTable(num_on_screen={num_on_screen}) is negative. Use 0 for no items on screen."
            )
        self._target = RunPath("CompletionsTable", path, "completions.jsonl")
        self._attempts = Attempts("CompletionsTable")
        self._history: History
        self._num_on_screen = num_on_screen

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(path=self._target.given)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._target.settle(trainer)
        path = self._target.place
        self._history = History(path if has_fitted(trainer) else outside_of_fit(path, trainer))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._target.go_on(trainer)
        self._history = History(self._target.place)
        if not trainer.is_global_zero or is_rehearsal(trainer):
            return
        source = rollout_source(pl_module, self)
        with self._attempts.attempt():
            self._history.check()
            if trainer.ckpt_path is None and source.env_step == 0:
                self._target.warn_of_others([self._history.place])
            self._history.begin(trainer, source)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, pl_module)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source = rollout_source(pl_module, self)
        rollouts = source.evaluation_rollouts()
        rows = completion_rows(rollouts)
        if not trainer.is_global_zero:
            return
        if not is_rehearsal(trainer):
            with self._attempts.attempt():
                self._record(trainer, source.env_step, rows)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                _log_table(logger, source.env_step, rows)
        if may_print(trainer) and self._num_on_screen:
            tasks = task_texts(rollouts, self._num_on_screen)
            show(
                [row for row in rows if row["index"] in tasks], tasks, title=f"Evaluation at env_step {source.env_step}"
            )

    def _record(self, trainer: Trainer, env_step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if has_fitted(trainer):
            self._history.add(trainer, env_step, rows, again=trainer.state.fn != "fit")
        else:
            self._history.replace(trainer, env_step, rows)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._target.state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._target.restore(state_dict)


def completion_rows(rollouts: Rollouts) -> list[dict[str, Any]]:
    """One plain row per node of an evaluation, item by item."""
    return [
        {
            "index": rollouts.indices[node.task],
            "turn": node.turn,
            "prompts": [prompt_text(prompt) for prompt in node.prompts],
            "completions": node.answers(0),
            "reward": node.rewards[0],
        }
        for node in sorted(rollouts.nodes, key=lambda node: (node.task, node.turn))
    ]


def task_texts(rollouts: Rollouts, num_items: int) -> dict[int, str]:
    """What the first items ask, by their index: their field ``prompt``, else the first agent's prompt."""
    first = {node.task: prompt_text(node.prompts[0]) for node in rollouts.nodes if node.turn == 1}
    pairs = list(zip(rollouts.indices, rollouts.items, strict=True))[:num_items]
    return {index: str(item.get("prompt", first.get(task, ""))) for task, (index, item) in enumerate(pairs)}


def show(rows: Sequence[Mapping[str, Any]], tasks: Mapping[int, str], title: str) -> None:
    """Print rows of completions; a live progress bar stays whole, as it takes over what is printed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    num_agents = max((len(row["completions"]) for row in rows), default=0)
    table = Table("item", "task", "turn", *(f"agent {agent}" for agent in range(num_agents)), "reward", title=title)
    for row, following in zip_longest(rows, rows[1:]):
        texts = (Text(text) for text in row["completions"])
        item = (str(row["index"]), Text(tasks[row["index"]])) if row["turn"] == 1 else ("", "")
        is_last = following is None or following["index"] != row["index"]
        table.add_row(*item, str(row["turn"]), *texts, f"{row['reward']:.3f}", end_section=is_last)
    console, page = Console(), io.BytesIO()
    if console.is_jupyter:
        console.print(table)
        return
    # Left to write by itself, a console ends the process whose reader is gone.
    sheet = io.TextIOWrapper(page, console.encoding, "replace", newline="")
    Console(file=sheet, width=console.width, force_terminal=console.is_terminal).print(table)
    say(page.getvalue().decode(console.encoding))


def _log_table(logger: WandbLogger, env_step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """`env_step` is a column: a table's row has no x-axis."""
    if not rows:
        return
    agents = range(len(rows[0]["completions"]))
    columns = ["env_step", "index", "turn"]
    columns += [f"{part}_{agent}" for agent in agents for part in ("prompt", "completion")] + ["reward"]
    data = []
    for row in rows:
        parts = [part for pair in zip(row["prompts"], row["completions"], strict=True) for part in pair]
        data.append([env_step, row["index"], row["turn"], *parts, row["reward"]])
    logger.log_table(key="eval/completions", columns=columns, data=data)
