"""What a user writes about the critics: plain, light descriptions, like those of the agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comlrl_lightning.agents.settings import LoraSettings, is_name
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.utilities.checks import check_whole


@dataclass(frozen=True)
class ValueHead(KnownKeywords):
    """A critic that reads the hidden states of the agent itself: no more than a small head beside the model.

    Its loss reaches the agent's own adapter or weights, with `value_loss_coef` as its weight. For one critic per agent.
    """

    hidden_size: int | None = None
    """Width of a hidden layer in the head; None: a linear head."""
    heads: list[str] | None = None
    """Folders of saved heads to go on from, one per agent."""

    def __post_init__(self) -> None:
        _check_hidden_size(self)


@dataclass(frozen=True)
class AdapterCritic(KnownKeywords):
    """A critic with a LoRA adapter of its own on the agents' frozen base model: no second model is loaded.

    A central critic of agents with separate models lives on the model of agent 0.
    """

    lora: LoraSettings | None = None
    """Shape of the adapter; None: that of `LoraSettings()`. Unused when `adapters` are loaded."""
    hidden_size: int | None = None
    """Width of a hidden layer in the head; None: a linear head."""
    adapters: list[str] | None = None
    """Folders of saved critics to go on from: one per agent, or a single one for a central critic."""
    max_tokens: int | None = None
    """Longest text that it reads, cut from the left, prompts before answers; the model's own limit always holds."""

    def __post_init__(self) -> None:
        _check_hidden_size(self)
        if self.lora is not None and not isinstance(self.lora, LoraSettings):
            raise ValueError(f"AdapterCritic(lora={self.lora!r}) is not a LoraSettings. Use LoraSettings().")
        if self.max_tokens is not None:
            check_whole(1, "AdapterCritic", max_tokens=self.max_tokens)


@dataclass(frozen=True)
class ModelCritic(KnownKeywords):
    """A critic on a language model of its own, of any family, which reads texts through its own tokenizer.

    A loaded model is taken over: its dropout is switched off, and under `lora` its weights are frozen. A folder that
    `save_agents` wrote brings its head along.
    """

    model: str | Any | None = None
    """Hub name, local folder or loaded `PreTrainedModel`; for one critic per agent a name, loaded once per agent."""
    models: list[Any] | None = None
    """One model per agent instead."""
    lora: LoraSettings | None = None
    """Shape of its adapter; None trains all weights. Adapter folders go on training the adapter they hold."""
    tokenizer: str | Any | None = None
    """Name, folder or loaded tokenizer; None takes the model's. Required with a loaded model."""
    tokenizers: list[Any] | None = None
    """One tokenizer per model of `models` instead."""
    hidden_size: int | None = None
    """Width of a hidden layer in the head; None: a linear head."""
    dtype: str | None = None
    """Number format of the loaded weights. None: the checkpoint's under an adapter, "float32" otherwise."""
    model_kwargs: dict[str, Any] | None = None
    """More arguments for `from_pretrained` of the models."""
    max_tokens: int | None = None
    """Longest text that it reads, cut from the left, prompts before answers; the model's own limit always holds."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""

    def __post_init__(self) -> None:
        _check_hidden_size(self)
        if (self.model is None) == (self.models is None):
            raise ValueError(
                f"ModelCritic(model={self.model!r}, models={self.models!r}) must have exactly one of the two. "
                "Give model= or, for one critic per agent, models=[...]."
            )
        if self.max_tokens is not None:
            check_whole(1, "ModelCritic", max_tokens=self.max_tokens)
        self._check_models()

    def _check_models(self) -> None:
        models = [self.model] if self.models is None else self.models
        tokenizers = [self.tokenizer] if self.models is None else self.tokenizers or [None] * len(models)
        if is_name(models) or len(tokenizers) != len(models):
            raise ValueError(
                f"ModelCritic(models={self.models!r}, tokenizers={self.tokenizers!r}) do not match. "
                "Give two lists with one entry per agent, or leave tokenizers out."
            )
        loaded = [not is_name(model) for model in models]
        if any(given and tokenizer is None for given, tokenizer in zip(loaded, tokenizers, strict=True)):
            raise ValueError(
                "ModelCritic(...) has a loaded model without a tokenizer. Pass tokenizer=, or tokenizers=[...]."
            )
        if any(loaded) and (self.dtype, self.model_kwargs) != (None, None):
            raise ValueError(
                f"ModelCritic(dtype={self.dtype!r}, model_kwargs={self.model_kwargs!r}) cannot apply to a model that "
                "is already loaded. Pass its name or folder, or leave both out."
            )


CriticSettings = ValueHead | AdapterCritic | ModelCritic


def check_critic(critic: CriticSettings, num_agents: int, centralized: bool) -> None:
    """Refuse critics that do not fit the number of agents, before any weights load.

    Args:
        critic: Settings of the critics.
        num_agents: N.
        centralized: One critic that reads all agents.

    Raises:
        ValueError: They do not fit.
    """
    if not isinstance(critic, ValueHead | AdapterCritic | ModelCritic):
        raise ValueError(f"critic={critic!r} is no critic. Use ValueHead(), AdapterCritic() or ModelCritic(model=...).")
    if centralized and isinstance(critic, ValueHead):
        raise ValueError(
            "critic=ValueHead() reads the history of one agent, but a central critic reads that of all. "
            "Use AdapterCritic() or ModelCritic(model=...)."
        )
    if isinstance(critic, ModelCritic):
        _check_number_of_models(critic, num_agents, centralized)
        return
    name, folders = ("heads", critic.heads) if isinstance(critic, ValueHead) else ("adapters", critic.adapters)
    num_critics = 1 if centralized else num_agents
    if folders is not None and (is_name(folders) or len(folders) != num_critics):
        raise ValueError(
            f"critic={type(critic).__name__}({name}={folders!r}) does not fit {num_critics} critics. "
            "Give a list with one folder per critic."
        )


def _check_number_of_models(critic: ModelCritic, num_agents: int, centralized: bool) -> None:
    if critic.models is not None and (centralized or len(critic.models) != num_agents):
        wanted = "one central critic. Give model=" if centralized else f"{num_agents} agents. Give one model per agent"
        raise ValueError(f"critic=ModelCritic(models=...) has {len(critic.models)} models for {wanted}.")
    if critic.models is None and not is_name(critic.model) and not centralized and num_agents > 1 and not critic.lora:
        raise ValueError(
            f"critic=ModelCritic(model=...) is one loaded model, but {num_agents} agents have a critic each. "
            "Give models=[...], a name, or lora=LoraSettings() for adapters on the one model."
        )


def _check_hidden_size(critic: CriticSettings) -> None:
    if critic.hidden_size is not None:
        check_whole(1, type(critic).__name__, hidden_size=critic.hidden_size)
