"""A whole round against a chat model: what the server does wrong, and what is left of the round then."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from comlrl_lightning import MADPO, TaskDataModule
from comlrl_lightning.preferences.api import ChatError
from tests.algorithms.preferences import direct
from tests.algorithms.support import ITEMS, make_trainer
from tests.preferences.asking import KEY, api
from tests.preferences.chat_server import ChatServer, Reply, openai_reply


def module_with(server: ChatServer) -> MADPO:
    return direct(comparator=api(server.url), num_candidates=2)


def fit(module: MADPO, callbacks: Any = (), resume: Path | None = None) -> None:
    trainer = make_trainer(callbacks, max_epochs=module.epochs_per_round, enable_checkpointing=bool(callbacks))
    trainer.fit(module, TaskDataModule(ITEMS[:2]), ckpt_path=resume)


def answer(body: dict[str, Any]) -> Reply:
    """The prompt back, in capital letters."""
    return openai_reply(body["messages"][-1]["content"].upper())


def test_a_round_against_a_chat_model(server: ChatServer) -> None:
    server.otherwise = answer
    module = module_with(server)
    fit(module)
    # Two items, two agents, two candidates; two of the policy's per item are scored too.
    assert len(server.bodies) == 8
    assert module.env_step == 8
    assert module.last_round is not None
    sources = {source for pair in module.last_round.pairs for source in (pair.winner_source, pair.loser_source)}
    assert sources == {"policy", "comparator"}
    assert module.update_step > 0


def test_what_fails_loses_nothing_of_the_round_and_shows_no_key(server: ChatServer, tmp_path: Path) -> None:
    server.otherwise = answer
    whole = module_with(server)
    fit(whole)
    # The first item's four requests pass; the second's are refused, by a server that repeats the key.
    broken = [answer({"messages": [{"content": ITEMS[0]["prompt"]}]}) for _ in range(4)]
    server.script = [*broken, *(Reply(400, {"error": {"message": f"bad key {KEY}"}}) for _ in range(4))]
    module = module_with(server)
    saving = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ChatError) as failure:
        fit(module, [saving])
    shown = "".join(traceback.format_exception(failure.value))
    assert "CHAT_KEY" in shown or "400" in shown
    assert KEY not in shown
    (path,) = tmp_path.glob("*.ckpt")
    assert KEY.encode() not in path.read_bytes()
    assert torch.load(path, weights_only=True)["comlrl_lightning"]["own"]["rounds"]["ranks"][0]["collected"]
    server.script = []
    resumed = module_with(server)
    fit(resumed, resume=path)
    assert resumed.last_round == whole.last_round
    assert resumed.env_step == whole.env_step
