"""The pairs of each round as a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.support import is_rehearsal, run_folder, write_whole
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.preferences.pairs import PreferencePair, Round, RoundSource


class PreferenceRounds(Callback, KnownKeywords):
    """Write the pairs of each round as JSON when its collecting epoch is over: ``round_0001.json`` and so on.

    A file holds ``iteration`` (the round, from 1), ``num_pairs``, ``candidate_reward_mean`` and ``pairs``. Each pair
    has ``item_index`` and, per agent, ``prompts`` and ``prompt_ids``; for its two sides ``winner_completions``,
    ``winner_token_ids``, ``winner_reward``, ``winner_source`` (``policy`` or ``comparator``), and the same of the
    loser. A round without pairs has a file too.

    Files appear whole, on rank zero, and never in a `fast_dev_run`. A new run removes those of an earlier run; a
    resumed one goes on where its checkpoint stands, which itself holds the rounds that are needed.

    Args:
        dirpath: Where the files go; None takes ``rounds`` in the folder of the run.

    Example::

        trainer = Trainer(callbacks=[PreferenceRounds("runs/rounds")])
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        super().__init__()
        self._is_given = dirpath is not None
        self._folder = Path("rounds" if dirpath is None else dirpath)
        self._written: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._is_given:
            self._folder = Path(trainer.strategy.broadcast(run_folder(trainer))) / "rounds"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._written = None
        is_new = trainer.ckpt_path is None and _round_source(pl_module).last_round is None
        if is_new and trainer.is_global_zero and not is_rehearsal(trainer):
            for path in self._folder.glob("round_[0-9][0-9][0-9][0-9].json"):
                path.unlink()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last = _round_source(pl_module).last_round
        if last is None or last.number == self._written:
            return
        self._written = last.number
        if trainer.is_global_zero and not is_rehearsal(trainer):
            text = json.dumps(_record(last), ensure_ascii=False) + "\n"
            path = self._folder / f"round_{last.number + 1:04d}.json"
            write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def _round_source(pl_module: LightningModule) -> RoundSource:
    if not isinstance(pl_module, RoundSource):
        raise ValueError(
            f"PreferenceRounds needs a module that learns from preferences, got {type(pl_module).__name__}. "
            "Use it with MADPO or MARLHF."
        )
    return pl_module


def _record(source: Round) -> dict[str, Any]:
    mean = source.candidate_reward_mean
    return {
        "iteration": source.number + 1,
        "num_pairs": len(source.pairs),
        "candidate_reward_mean": mean if math.isfinite(mean) else None,
        "pairs": [_pair_record(pair) for pair in source.pairs],
    }


def _pair_record(pair: PreferencePair) -> dict[str, Any]:
    return {
        "item_index": pair.item_index,
        "prompts": [completion.prompt for completion in pair.winner],
        "prompt_ids": [completion.prompt_ids for completion in pair.winner],
        "winner_completions": [completion.text for completion in pair.winner],
        "winner_token_ids": [completion.token_ids for completion in pair.winner],
        "winner_reward": pair.winner_reward,
        "winner_source": pair.winner_source,
        "loser_completions": [completion.text for completion in pair.loser],
        "loser_token_ids": [completion.token_ids for completion in pair.loser],
        "loser_reward": pair.loser_reward,
        "loser_source": pair.loser_source,
    }
