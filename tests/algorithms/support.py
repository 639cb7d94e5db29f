"""Small teams, a task and short fits for the tests of the algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from comlrl_lightning.agents.settings import LoraSettings, Sampling, Separate, SharedBase
from comlrl_lightning.agents.team import TokenScores
from comlrl_lightning.algorithms import CooperativeModule
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.types import Completion, Rollouts
from tests.tiny_lm import tiny_gpt2, tiny_llama, tiny_qwen2, tiny_tokenizer

Kind = Literal["shared", "separate", "full"]
ENDS = [257, *range(60)]
"""Tokens that end a completion: about one in four, so that lengths differ."""
LORA = LoraSettings(rank=2, alpha=4.0)
ITEMS = [{"prompt": "hi"}, {"prompt": "there"}, {"prompt": "you all"}, {"prompt": "!"}]
MAKERS = (tiny_llama, tiny_qwen2, tiny_gpt2)


def tiny_model(agent: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """The model of an agent with own weights: another architecture for each of three agents."""
    model = MAKERS[agent](seed=agent).to(dtype)
    model.generation_config.eos_token_id = ENDS
    return model


def tiny_agents(
    kind: Kind = "shared", num_agents: int = 2, dtype: torch.dtype = torch.float64
) -> SharedBase | Separate:
    """Agents on loaded tiny models; double precision unless said otherwise."""
    if kind == "shared":
        return SharedBase(tiny_model(0, dtype), num_agents=num_agents, lora=LORA, tokenizer=tiny_tokenizer())
    agents = range(num_agents)
    return Separate(
        [tiny_model(agent, dtype) for agent in agents],
        lora=LORA if kind == "separate" else None,
        tokenizers=[tiny_tokenizer(reverse=agent == 1) for agent in agents],
    )


def uneven_reward(*completions: list[str]) -> list[float]:
    """Rewards without any pattern, which depend on what every agent says."""
    return [
        sum((agent + 1) * sum(text.encode()) for agent, text in enumerate(joint)) % 97 / 40
        for joint in zip(*completions, strict=True)
    ]


def echo(agent_completions: list[str]) -> list[str]:
    """The next prompts repeat what was said, so that they differ in length."""
    return [f"so {text}" for text in agent_completions]


class RecordingSGD(torch.optim.SGD):
    """Plain gradient descent that remembers the gradients of each step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        self.recorded: list[list[list[Tensor | None]]] = []
        """`[steps][N]` gradients of each agent's parameters."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self.recorded.append(
            [
                [None if parameter.grad is None else parameter.grad.clone() for parameter in group["params"]]
                for group in self.param_groups
            ]
        )
        result: float | None = super().step(closure)
        return result


class Collected(Callback):
    """Keeps what every training step collected."""

    def __init__(self) -> None:
        self.rollouts: list[Rollouts] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        assert pl_module.rollouts is not None
        self.rollouts.append(pl_module.rollouts)


M = TypeVar("M", bound=CooperativeModule)


def make_module(algorithm: type[M], agents: SharedBase | Separate | None = None, **settings: Any) -> M:
    """An algorithm with two agents, K=2 and completions of at most four tokens, unless said otherwise."""
    defaults: dict[str, Any] = {
        "reward_func": uneven_reward,
        "num_generations": 2,
        "sampling": Sampling(max_new_tokens=4),
        "seed": 1,
    }
    if settings.get("num_turns", 1) > 1:
        defaults["external_transition"] = echo
    return algorithm(tiny_agents() if agents is None else agents, **{**defaults, **settings})


def trained_a_little(module: M, size: float = 0.05, seed: int = 0) -> M:
    """Load the weights and move each agent's: fresh adapters leave the base as it is and half of their gradients 0."""
    module.configure_model()
    generator = torch.Generator().manual_seed(seed)
    for agent in range(module.num_agents):
        for parameter in module.team.agent_parameters(agent).values():
            noise = size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data = noise if module.agents.lora is not None else parameter.data + noise
    return module


def make_trainer(callbacks: Sequence[Callback] = (), **settings: Any) -> Trainer:
    """A silent trainer on the CPU, one epoch unless said otherwise."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**defaults, **settings})


def fit(
    module: CooperativeModule,
    items: Sequence[dict[str, Any]] = ITEMS[:2],
    batch_size: int = 2,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Trainer:
    """Train on some items and return the trainer."""
    trainer = make_trainer(callbacks, **settings)
    trainer.fit(module, TaskDataModule(list(items), batch_size=batch_size))
    return trainer


def weights(module: CooperativeModule, agent: int) -> dict[str, Tensor]:
    """A copy of an agent's trained weights."""
    return {name: value.detach().clone() for name, value in module.team.agent_parameters(agent).items()}


def beside_the_impossible(log_probs: Callable[..., TokenScores], agent: int = 1) -> Callable[..., TokenScores]:
    """`AgentTeam.log_probs` to which the first token of an agent's completions is impossible; gradients stay."""

    def lower(completions: Sequence[Completion], **how: Any) -> TokenScores:
        scores = log_probs(completions, **how)
        constant = torch.zeros_like(scores.log_probs)
        constant[[row for row, one in enumerate(completions) if one.agent == agent], 0] = -torch.inf
        return replace(scores, log_probs=scores.log_probs + constant)

    return lower


class MemoryLogger(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))
