"""Checkpoints of other runs and models, checkpoints that are none, and secrets that must not be in them."""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from comlrl_lightning import MAGRPO, LoraSettings, Sampling, Separate, SharedBase, TaskDataModule
from comlrl_lightning.agents.fingerprints import config_hash
from comlrl_lightning.algorithms import MADPO
from comlrl_lightning.preferences.comparators import APIComparator
from tests.algorithms.support import ITEMS, MAKERS, fit, make_trainer, tiny_agents, uneven_reward
from tests.faults.registry import Fault, Refused, faults
from tests.faults.runs import new_module
from tests.tiny_lm import save_tiny, tiny_llama, tiny_qwen2, tiny_tokenizer

LORA = LoraSettings(rank=2)


def two(*models: Any) -> Separate:
    """Adapters on two models."""
    return Separate(list(models), lora=LORA, tokenizers=[tiny_tokenizer(), tiny_tokenizer()])


def saved(folder: Path, agents: Any = None, **settings: Any) -> Path:
    """The checkpoint of a fit of one step."""
    module = new_module(agents=agents or tiny_agents(dtype=torch.float32), **settings)
    trainer: Trainer = fit(module, ITEMS[:1])
    trainer.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def go_on(checkpoint: Path, agents: Any = None, **settings: Any) -> None:
    """A fit that goes on from a checkpoint."""
    module = new_module(agents=agents or tiny_agents(dtype=torch.float32), **settings)
    make_trainer(max_epochs=2).fit(module, TaskDataModule(ITEMS[:1]), ckpt_path=checkpoint)


def another_loaded_base(folder: Path) -> None:
    """Loaded models have no name in the settings; only the checkpoint's own note tells them apart."""
    wider = SharedBase(tiny_llama(rope_theta=5e5), num_agents=2, lora=LORA, tokenizer=tiny_tokenizer())
    base = SharedBase(tiny_llama(), num_agents=2, lora=LORA, tokenizer=tiny_tokenizer())
    go_on(saved(folder, base), wider)


def other_weights(folder: Path) -> None:
    """As after `resize_token_embeddings`, which draws the rows of new tokens anew in each process."""
    first, second = tiny_llama(), tiny_llama()
    with torch.no_grad():
        second.model.embed_tokens.weight[-1] += 1
    bases = [SharedBase(model, num_agents=2, lora=LORA, tokenizer=tiny_tokenizer()) for model in (first, second)]
    go_on(saved(folder, bases[0]), bases[1])


def fewer_layers(folder: Path) -> None:
    narrow = SharedBase(tiny_llama(), 2, lora=LoraSettings(2, target_modules=["q_proj"]), tokenizer=tiny_tokenizer())
    MAGRPO.load_from_checkpoint(
        saved(folder, SharedBase(tiny_llama(), 2, lora=LORA, tokenizer=tiny_tokenizer())), agents=narrow
    )


def another_family(folder: Path) -> None:
    path = saved(folder, two(tiny_llama(), tiny_llama()))
    MAGRPO.load_from_checkpoint(path, agents=two(tiny_qwen2(), tiny_llama()))


def another_named_base(folder: Path) -> None:
    first, second = (save_tiny(folder / name, tiny_llama(), tiny_tokenizer()) for name in ("first", "second"))
    go_on(saved(folder, SharedBase(first, num_agents=2)), SharedBase(second, num_agents=2))


def another_order(folder: Path) -> None:
    path = saved(folder, two(tiny_llama(), tiny_qwen2()))
    MAGRPO.load_from_checkpoint(path, agents=two(tiny_qwen2(), tiny_llama()))


def fewer_agents(folder: Path) -> None:
    base = SharedBase(tiny_llama(), num_agents=3, lora=LORA, tokenizer=tiny_tokenizer())
    MAGRPO.load_from_checkpoint(saved(folder, base), agents=tiny_agents(dtype=torch.float32))


def a_wrapped_reward(folder: Path) -> None:
    @functools.wraps(uneven_reward)
    def twice(*completions: list[str]) -> list[float]:
        return [2 * reward for reward in uneven_reward(*completions)]

    MAGRPO.load_from_checkpoint(saved(folder, reward_func=twice), agents=tiny_agents(dtype=torch.float32))


def foreign(folder: Path) -> None:
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, folder / "foreign.ckpt")
    go_on(folder / "foreign.ckpt")


def cut(folder: Path) -> None:
    path = saved(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    go_on(path)


def by_time(folder: Path) -> None:
    callback = ModelCheckpoint(folder, train_time_interval=timedelta(seconds=1))
    make_trainer([callback], enable_checkpointing=True).fit(new_module(), TaskDataModule(ITEMS[:1]))


def weights_alone(folder: Path) -> None:
    trainer = fit(new_module(), ITEMS[:1])
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    go_on(folder / "weights.ckpt")


def too_early(folder: Path) -> None:
    class Broken(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            raise RuntimeError("no room")

    callbacks = [Broken(), OnExceptionCheckpoint(folder, "early")]
    trainer = make_trainer(callbacks, max_epochs=2, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="no room"):
        trainer.fit(new_module(), TaskDataModule(ITEMS[:1]), ckpt_path=saved(folder))
    go_on(folder / "early.ckpt")


def stopped_inside(folder: Path) -> Path:
    """The checkpoint of a run of two steps of an epoch of four."""
    trainer = make_trainer(max_steps=1)
    trainer.fit(new_module(), TaskDataModule(ITEMS))  # its buffer holds two nodes
    trainer.save_checkpoint(folder / "inside.ckpt")
    return folder / "inside.ckpt"


def limit_inside(folder: Path) -> None:
    trainer = make_trainer(limit_train_batches=1)
    trainer.fit(new_module(), TaskDataModule(ITEMS), ckpt_path=stopped_inside(folder))


def test_a_limit_that_is_lifted_is_told(tmp_path: Path) -> None:
    trainer = make_trainer(limit_train_batches=2)
    trainer.fit(new_module(), TaskDataModule(ITEMS))
    trainer.save_checkpoint(tmp_path / "limited.ckpt")
    module = new_module()
    with pytest.warns(UserWarning, match=r"last epoch ended after 2 items, by limit_train_batches.*next one"):
        make_trainer(max_epochs=2).fit(module, TaskDataModule(ITEMS), ckpt_path=tmp_path / "limited.ckpt")
    assert module.env_step == (2 + 4) * 2


CASES = (
    Refused(
        "checkpoints",
        "another base model, both given by name",
        "agents.model='...second' differs from the checkpoint's agents.model='...first': going on would mix two runs.",
        another_named_base,
    ),
    Refused(
        "checkpoints",
        "another base model, both loaded objects",
        "agent_0 was trained on a loaded model (LlamaForCausalLM, configuration ...), but here it stands on a loaded"
        " model (LlamaForCausalLM, configuration ...), where its weights mean nothing.",
        another_loaded_base,
    ),
    Refused(
        "checkpoints",
        "a loaded base whose rows of new tokens are other random ones",
        "agent_0 was trained on a loaded model (LlamaForCausalLM, configuration ...), which has other weights here;",
        other_weights,
    ),
    Refused(
        "checkpoints",
        "adapters on fewer layers, for an evaluation",
        "The checkpoint holds 48 weights of agents that have no place here, the first is 'team.",
        fewer_layers,
    ),
    Refused(
        "checkpoints",
        "a model of another family under one of the agents, for an evaluation",
        "agent_0 was trained on a loaded model (LlamaForCausalLM ... stands on a loaded model (Qwen2ForCausalLM",
        another_family,
    ),
    Refused(
        "checkpoints",
        "the agents in another order",
        "The agents are in another order: the checkpoint's are a loaded model (LlamaForCausalLM, ...), a loaded model"
        " (Qwen2ForCausalLM, ...), this module's are a loaded model (Qwen2ForCausalLM, ... Give agents= in the"
        " checkpoint's order.",
        another_order,
    ),
    Refused(
        "checkpoints",
        "fewer agents",
        "The checkpoint is of 3 language models, this module has 2.",
        fewer_agents,
    ),
    Refused(
        "checkpoints",
        "another seed",
        "seed=1 differs from the checkpoint's seed=0: going on would mix two runs. Use the checkpoint's value",
        lambda folder: go_on(saved(folder), seed=1),
    ),
    Refused(
        "checkpoints",
        "a wrapped reward, whose name leads to what it wraps",
        "reward_func was <tests.algorithms.support.uneven_reward object> when the checkpoint was saved. Pass"
        " reward_func= to load it, as in load_from_checkpoint(path, reward_func=...).",
        a_wrapped_reward,
    ),
    Refused(
        "checkpoints",
        "a reward of a script, loaded in another one",
        "reward_func was __main__.reward, formatters was __main__.brief when the checkpoint was saved, whose names in a"
        " script lead nowhere in another one. Pass reward_func=, formatters= to load it",
        lambda folder: MAGRPO(tiny_agents(), cast("Any", "__main__.reward"), formatters=cast("Any", "__main__.brief")),
    ),
    Refused(
        "checkpoints",
        "a checkpoint of another program",
        "The checkpoint was not saved by comlrl_lightning. Load its weights with agents= instead.",
        foreign,
    ),
    Refused(
        "checkpoints",
        "`ModelCheckpoint(train_time_interval=...)`, which Lightning never looks at",
        "ModelCheckpoint(train_time_interval=datetime.timedelta(...)) would save nothing ... Use BatchCheckpoint(",
        by_time,
    ),
    Refused(
        "checkpoints",
        "a run that goes on from `save_weights_only=True`",
        "The checkpoint holds weights alone, as save_weights_only=True makes them ... Save without that, or load",
        weights_alone,
    ),
    Refused(
        "checkpoints",
        "a checkpoint of a run that had not gone on from its own yet",
        "The checkpoint was saved before the run that it is of had gone on from its own checkpoint. Resume from that",
        too_early,
    ),
    Refused(
        "checkpoints",
        "inside an epoch, on with a `limit_train_batches` that is reached already",
        "limit_train_batches=1 makes epochs of 1 batches, but the checkpoint was saved inside an epoch after 2.",
        limit_inside,
    ),
    Refused("checkpoints", "a checkpoint that was cut", "PytorchStreamReader failed", cut, RuntimeError),
    Refused(
        "checkpoints",
        "a checkpoint that is not there",
        "Checkpoint file not found: ... nosuch.ckpt",
        lambda folder: go_on(folder / "nosuch.ckpt"),
        FileNotFoundError,
    ),
)


@faults(*CASES)
def test_refused(fault: Refused, tmp_path: Path) -> None:
    fault.check(tmp_path)


def test_a_folder_may_move(tmp_path: Path) -> None:
    first, second = (save_tiny(tmp_path / name, tiny_llama(), tiny_tokenizer()) for name in ("first", "second"))
    path = saved(tmp_path, SharedBase(first, num_agents=2, lora=LORA))
    module = MAGRPO.load_from_checkpoint(path, agents=SharedBase(second, num_agents=2, lora=LORA))
    assert module.env_step == 2


def test_the_hash_is_of_what_counts() -> None:
    hashes = [config_hash(make(seed=0).config) for make in MAKERS]
    assert len({*hashes, config_hash(tiny_llama(rope_theta=5e5).config)}) == 4
    other_weights = tiny_llama(seed=3)
    other_weights.config.use_cache, other_weights.config.eos_token_id = False, [1, 2]
    assert config_hash(other_weights.config) == hashes[0]


SECRET = "sk-3f9a77c0d1"


@pytest.mark.filterwarnings(r"ignore:Trainer\(max_epochs=1\) ends inside a round")
@faults(
    Fault(
        "checkpoints",
        "a key in an environment variable that a comparator uses",
        "the checkpoint holds the variable's name and not the key, and loads with weights_only=True",
    )
)
def test_no_key_in_a_checkpoint(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHAT_KEY", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    comparator = APIComparator(
        provider="openai", model="tiny", base_url="http://127.0.0.1:9/v1", api_key_env="CHAT_KEY"
    )
    agents = tiny_agents(dtype=torch.float32)
    module = MADPO(agents, uneven_reward, sampling=Sampling(max_new_tokens=3), comparator=comparator)
    trainer = make_trainer(limit_train_batches=0)
    trainer.fit(module, TaskDataModule(ITEMS[:1]))
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    content = (tmp_path / "saved.ckpt").read_bytes()
    assert SECRET.encode() not in content
    assert b"CHAT_KEY" in content
    assert torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
