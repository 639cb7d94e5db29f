"""Task items, models and files that are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.evaluation import evaluate
from tests.faults.registry import Refused, faults
from tests.faults.runs import new_module
from tests.tiny_lm import save_tiny, tiny_llama, tiny_tokenizer


def generated() -> Iterator[dict[str, str]]:
    yield {"prompt": "once"}


class Stream:
    """Items without a length."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return generated()


DATA = (
    Refused("data", "an empty list", "train_dataset has no rows. Give at least one.", lambda _: TaskDataModule([])),
    Refused(
        "data",
        "a generator, which can be read only once",
        "can be read only once, but every epoch reads it. Give a list, or datasets.IterableDataset.from_generator",
        lambda _: TaskDataModule(generated()),
    ),
    Refused(
        "data",
        "a row that is a text",
        "Row 0 of train_dataset is 'hi'. Give dicts, for instance {'prompt': 'a task'}.",
        lambda _: TaskDataModule(["hi"]),
    ),
    Refused(
        "data",
        "all splits at once",
        "train_dataset is a mapping with the keys ['train'] and no path. Give one split out of it",
        lambda _: TaskDataModule({"train": [{"prompt": "hi"}]}),
    ),
    Refused(
        "data",
        "shuffling a stream without a length",
        "shuffle=True cannot reorder train_dataset=",
        lambda _: TaskDataModule(Stream(), shuffle=True),
    ),
    Refused(
        "data",
        "the import path of a function that is not there",
        "train_dataset='nosuch.items' is not the import path of a function",
        lambda _: TaskDataModule("nosuch.items"),
    ),
    Refused(
        "data",
        "no items in a step",
        "batch_size=0 is not a positive whole number. Give 1 or more.",
        lambda _: TaskDataModule([{"prompt": "hi"}], batch_size=0),
    ),
    Refused(
        "data",
        "a list of items in place of a data module in `evaluate`",
        "is no TaskDataModule. Use TaskDataModule(..., eval_dataset=...).",
        lambda _: evaluate(new_module(), [{"prompt": "hi"}]),  # type: ignore[arg-type]
    ),
)


def build(settings: SharedBase | Separate) -> AgentTeam:
    """Load the models."""
    return build_team(settings)


def adapter_of_nothing(folder: Path) -> None:
    """An adapter whose file has forgotten its base model."""
    build(SharedBase(tiny_llama(), num_agents=1, tokenizer=tiny_tokenizer())).save(folder)
    config = folder / "agent_0" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    build(Separate([str(folder / "agent_0")]))


def small_vocabulary() -> Any:
    return tiny_llama(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=3)


def cut_weights(folder: Path) -> None:
    """A model folder from a disk that was full."""
    weights = Path(save_tiny(folder)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    build(SharedBase(str(folder), num_agents=1))


def chat_without_template(folder: Path) -> None:
    """Chat messages for a model that was not trained to chat."""
    team = build(SharedBase(tiny_llama(), num_agents=1, tokenizer=tiny_tokenizer()))
    team.encode(0, [{"role": "user", "content": "hi"}])


def taken_twice(folder: Path) -> None:
    """A model object in two teams."""
    model = tiny_llama()
    for _ in range(2):
        build(SharedBase(model, num_agents=1, tokenizer=tiny_tokenizer()))


MODELS = (
    Refused(
        "models",
        "a folder that is not there",
        "The model './nosuch' is neither a folder nor a hub name. Correct the path.",
        lambda _: build(SharedBase("./nosuch", num_agents=1)),
    ),
    Refused(
        "models",
        "an adapter folder that does not name its base",
        "of agent_0 does not say which model it belongs to. Set base_model_name_or_path in its adapter_config.json.",
        adapter_of_nothing,
    ),
    Refused(
        "models",
        "a tokenizer with more tokens than the model",
        "The tokenizer of agent_0 has 259 tokens, its model only 100. Pass the tokenizer that belongs to the model",
        lambda _: build(SharedBase(small_vocabulary(), num_agents=1, tokenizer=tiny_tokenizer())),
    ),
    Refused(
        "models",
        "something that is no language model",
        "SharedBase got a model of type Linear. Pass a name, a folder or a transformers PreTrainedModel.",
        lambda _: build(SharedBase(nn.Linear(1, 1), num_agents=1, tokenizer=tiny_tokenizer())),
    ),
    Refused(
        "models",
        "a loaded model that another module has taken over",
        "carries adapters already, perhaps because another module took it over. Load a fresh one",
        taken_twice,
    ),
    Refused(
        "models",
        "chat messages for a tokenizer without a chat template",
        "The prompt of agent_0 is a list of chat messages, but its tokenizer has no chat template.",
        chat_without_template,
    ),
)


@faults(*DATA, *MODELS)
def test_refused(fault: Refused, tmp_path: Path) -> None:
    fault.check(tmp_path)
