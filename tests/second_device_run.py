"""The same trainings on one device and on two; prints as JSON how far they end apart. Run by `test_strategies.py`."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from comlrl_lightning import (
    IAC,
    MAAC,
    MADPO,
    MAGRPO,
    MARLHF,
    AgentParallel,
    CooperativeModule,
    FixedModel,
    JointRewardModel,
    ModelCritic,
    Sampling,
    Separate,
    TaskDataModule,
    ValueHead,
)
from tests.algorithms.support import ITEMS, echo, fit, make_trainer, tiny_agents, uneven_reward
from tests.second_device import NAME, register
from tests.tiny_lm import tiny_llama, tiny_tokenizer

SECOND = f"{NAME}:0"
"""Autograd knows only the first device of a kind that is written in Python."""
THIRD = f"{NAME}:1"

RESUMED = "resumed"
"""The case in which a run changes its devices."""

Settings = Callable[[], dict[str, Any]]


class Placing(AgentParallel):
    """Lets parameters of another class of tensors take the place of those on the CPU, tied ones included."""

    def model_to_device(self) -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        super().model_to_device()
        torch.__future__.set_swap_module_params_on_conversion(False)


def critic_model() -> Any:
    return tiny_llama(seed=7).double()


def agents() -> Separate:
    """Two heterogeneous agents, all weights trained, in float64."""
    made = tiny_agents("full")
    assert isinstance(made, Separate)
    return made


def own_critics() -> ModelCritic:
    return ModelCritic(models=[critic_model(), critic_model()], tokenizers=[tiny_tokenizer(), tiny_tokenizer()])


CASES: dict[str, tuple[type[CooperativeModule], Settings, dict[str, str]]] = {
    "MAGRPO": (
        MAGRPO,
        lambda: {
            "num_turns": 2,
            "external_transition": echo,
            "num_generations": 2,
            "reference_kl_coef": 0.1,
            "clip_epsilon": 0.2,
            "num_inner_epochs": 2,
        },
        {"reference_device": THIRD},
    ),
    "IAC": (
        IAC,
        lambda: {"num_turns": 2, "external_transition": echo, "critic": own_critics()},
        {"critic_device": SECOND},
    ),
    "IAC with heads": (IAC, lambda: {"critic": ValueHead()}, {}),
    "MAAC": (MAAC, lambda: {"critic": ModelCritic(critic_model(), tokenizer=tiny_tokenizer())}, {}),
    "MADPO": (
        MADPO,
        lambda: {"reference_free": False, "comparator": FixedModel(agents())},
        {"reference_device": THIRD},
    ),
    "MARLHF": (
        MARLHF,
        lambda: {"reward_model": JointRewardModel(model=ModelCritic(critic_model(), tokenizer=tiny_tokenizer()))},
        {"critic_device": SECOND},
    ),
}


class Tokens(Callback):
    """Every token that was sampled."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        nodes = () if pl_module.rollouts is None else pl_module.rollouts.nodes
        self.seen += [one.token_ids for node in nodes for group in node.completions for one in group]


def module_of(name: str) -> CooperativeModule:
    algorithm, settings, _ = CASES[name]
    return algorithm(
        agents(),
        uneven_reward,
        sampling=Sampling(max_new_tokens=4),
        micro_batch_tokens=60,
        agent_learning_rate=1e-3,
        seed=1,
        **settings(),
    )


def weights_of(module: CooperativeModule) -> list[Tensor]:
    """All weights; `parameters` would count tied ones twice that Lightning has brought back to the CPU."""
    parts = ("team.", "critics.", "reward_network.")
    return [value for name, value in module.state_dict().items() if name.startswith(parts)]


def trained(name: str, strategy: AgentParallel | None) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """All weights after some epochs, and every token that was sampled."""
    tokens, module = Tokens(), module_of(name)
    # Rounds of preferences collect in their first epoch, then learn.
    fit(module, ITEMS, 2, [tokens], max_epochs=3, **({} if strategy is None else {"strategy": strategy}))
    return weights_of(module), tokens.seen


def compared(name: str) -> dict[str, Any]:
    """One device against two, and how far training has come."""
    untrained = module_of(name)
    untrained.configure_model()
    start = weights_of(untrained)
    one, tokens = trained(name, None)
    two, others = trained(name, Placing(["cpu", SECOND], **CASES[name][2]))
    return {
        "num_tokens": sum(map(len, tokens)),
        "same_tokens": tokens == others,
        "moved": _distance(start, one),
        "difference": _distance(one, two),
    }


def resumed() -> dict[str, Any]:
    """A run that changes between one device and two with its checkpoint, against one that never stops."""
    unbroken, _ = trained("MAGRPO", None)
    distances = {}
    for first, then in (("one", "two"), ("two", "one")):
        with tempfile.TemporaryDirectory() as folder:
            saver = ModelCheckpoint(folder, filename="epoch", every_n_epochs=1)
            fit(module_of("MAGRPO"), ITEMS, 2, [saver], max_epochs=2, enable_checkpointing=True, **placed(first))
            module = module_of("MAGRPO")
            trainer = make_trainer(max_epochs=3, **placed(then))
            trainer.fit(module, TaskDataModule(ITEMS, batch_size=2), ckpt_path=str(Path(folder, "epoch.ckpt")))
            distances[f"{first} to {then}"] = _distance(unbroken, weights_of(module))
    return distances


def placed(devices: str) -> dict[str, Any]:
    """What a trainer needs for one device or two."""
    return {} if devices == "one" else {"strategy": Placing(["cpu", SECOND], reference_device=THIRD)}


def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    pairs = [(a.detach().cpu().double(), b.detach().cpu().double()) for a, b in zip(left, right, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    register()
    results = {name: resumed() if name == RESUMED else compared(name) for name in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
