"""The pairs of each round as a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.run_path import Attempts, RunPath
from comlrl_lightning.callbacks.support import is_rehearsal
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.preferences.pairs import PreferencePair, Round, RoundSource


class PreferenceRounds(Callback, KnownKeywords):
    """Write the pairs of each round as JSON when its collecting epoch is over: ``round_0001.json`` and so on.

    A file holds ``iteration`` (the round, from 1), ``num_pairs``, ``candidate_reward_mean`` and ``pairs``. Each pair
    has ``item_index`` and, per agent, ``prompts`` and ``prompt_ids``; for its two sides ``winner_completions``,
    ``winner_token_ids``, ``winner_reward``, ``winner_source`` (``policy`` or ``comparator``), and the same of the
    loser. A round without pairs has a file too.

    Files appear whole, on rank zero, and never in a `fast_dev_run`. A new run removes those of an earlier run and says
    so; a resumed one goes on where its checkpoint stands, which itself holds the rounds that are needed. A disk that
    takes no file ends no run.

    Args:
        dirpath: Where the files go, also an address such as ``s3://bucket/rounds`` that fsspec reaches; None takes
            ``rounds`` in the folder of the run.

    Example::

        trainer = Trainer(callbacks=[PreferenceRounds("runs/rounds")])
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        super().__init__()
        self._target = RunPath("PreferenceRounds", dirpath, "rounds")
        self._attempts = Attempts("PreferenceRounds")
        self._written: int | None = None

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(dirpath=self._target.given)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._target.settle(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._target.go_on(trainer)
        self._written = None
        is_new = trainer.ckpt_path is None and _round_source(pl_module).last_round is None
        if is_new and trainer.is_global_zero and not is_rehearsal(trainer):
            with self._attempts.attempt():
                others = self._target.place.glob("round_[0-9][0-9][0-9][0-9].json")
                self._target.warn_of_others(others, "removes")
                for path in others:
                    path.remove()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._target.state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._target.restore(state_dict)

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
            with self._attempts.attempt():
                (self._target.place / f"round_{last.number + 1:04d}.json").write_text(text)


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
