"""What a user writes about the agents: plain, light descriptions. Weights load later, in `AgentTeam.build`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from comlrl_lightning.agents.engine import GenerationEngine
from comlrl_lightning.agents.sampling import Sampling as Sampling
from comlrl_lightning.keywords import KnownKeywords, known_keywords
from comlrl_lightning.utilities.checks import check_choice_of, check_number, check_whole
from comlrl_lightning.utilities.documentation import document_fields

Reference = Literal["auto", "base", "initial"]


def _check_flags(owner: str, **values: object) -> None:
    for name, value in values.items():
        check_choice_of(owner, name, value, (True, False))


def _check_mappings(owner: str, **values: object) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{owner}({name}={value!r}) is no mapping. Give a dict of arguments by name.")


def _check_layers(owner: str, **values: object) -> None:
    for name, value in values.items():
        several = [value] if isinstance(value, str) else value
        if value is not None and not (
            isinstance(several, list | tuple) and all(isinstance(one, str) for one in several)
        ):
            raise ValueError(f"{owner}({name}={value!r}) names no layers. Give a text or a list of texts.")


def is_name(model: object) -> bool:
    """Whether a model or tokenizer is given by name or folder and not as a loaded object."""
    return isinstance(model, (str, Path))


@known_keywords
@document_fields
@dataclass(frozen=True)
class LoraSettings:
    """A low-rank adapter, as PEFT's `LoraConfig` understands it."""

    rank: int = 16
    """Rank of the two factors."""
    alpha: float = 32.0
    """Numerator of the scale: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
    dropout: float = 0.0
    """Stays 0: rollouts and updates must score the same policy."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get an adapter, or "all-linear" for every linear layer but the head."""
    exclude_modules: str | list[str] | None = None
    """Names of layers that get none."""
    modules_to_save: list[str] | None = None
    """Layers that every agent copies and trains in full (slower: agents then run one after the other), such as
    ["embed_tokens", "lm_head"] where tokens were added to the model: their rows stay as they are otherwise."""
    use_rslora: bool = False
    """Rank-stabilized scale."""
    use_dora: bool = False
    """Weight-decomposed adapters (slower: agents then run one after the other)."""

    def __post_init__(self) -> None:
        check_whole(1, "LoraSettings", rank=self.rank)
        check_number("a number above 0", lambda alpha: alpha > 0, "LoraSettings", alpha=self.alpha)
        _check_flags("LoraSettings", use_rslora=self.use_rslora, use_dora=self.use_dora)
        _check_layers(
            "LoraSettings",
            target_modules=self.target_modules,
            exclude_modules=self.exclude_modules,
            modules_to_save=self.modules_to_save,
        )
        if self.dropout != 0:
            raise ValueError(
                f"LoraSettings(dropout={self.dropout!r}) would let rollouts and updates score different policies. "
                "Use 0."
            )


TEMPLATE_ARGUMENTS = (
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Arguments of `apply_chat_template` that say what comes out of it, not what the template writes."""


@dataclass(frozen=True, kw_only=True)
class TeamSettings(KnownKeywords):
    """What both kinds of team have in common."""

    dtype: str | None = None
    """Number format of the loaded weights: "float32", "bfloat16", "float16" or "auto" (the checkpoint's). None: "auto"
    under adapters, "float32" for full fine-tuning. Adapters are float32 in any case."""
    reference: Reference = "auto"
    """Policy that the KL divergence is taken to: "base" is the model without adapters, "initial" the agents as they
    were loaded, "auto" the latter when trained adapters were loaded. Full fine-tuning always keeps a frozen copy."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    model_kwargs: dict[str, Any] | None = None
    """More arguments for `from_pretrained` of the models."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More arguments for the chat template, such as `enable_thinking: false`."""
    max_prompt_tokens: int | None = None
    """Longest prompt; the model's own limit holds in any case."""
    long_prompts: Literal["truncate", "error"] = "truncate"
    """Cut longer prompts from the left (with one warning), or raise an error."""
    engine: GenerationEngine | None = None
    """What samples completions: a `GenerationEngine`, such as a server's. None: the loop of ``Sampling(backend=...)``
    in this process."""
    special_tokens: Literal["keep", "error"] = "keep"
    """What becomes of special tokens that a prompt's text names, such as `<|im_end|>` in a task item: the tokenizer
    reads them as such, hence as the end of a message ("keep"), or they are an error ("error"). The template of chat
    messages writes its own in any case; a formatter that returns a text in which it has written them needs "keep"."""

    def _check_common(self) -> None:
        owner = type(self).__name__
        if self.dtype is not None:
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_choice_of(owner, "dtype", self.dtype, (None, "auto", "float32", "bfloat16", "float16", "float64"))
        check_choice_of(owner, "reference", self.reference, ("auto", "base", "initial"))
        check_choice_of(owner, "long_prompts", self.long_prompts, ("truncate", "error"))
        check_choice_of(owner, "special_tokens", self.special_tokens, ("keep", "error"))
        _check_flags(owner, gradient_checkpointing=self.gradient_checkpointing)
        _check_mappings(owner, model_kwargs=self.model_kwargs, chat_template_kwargs=self.chat_template_kwargs)
        if taken := [name for name in TEMPLATE_ARGUMENTS if name in (self.chat_template_kwargs or {})]:
            raise ValueError(
                f"{owner}(chat_template_kwargs=...) holds {taken[0]!r}, which agents set themselves. Leave it out; the"
                " template's own variables are what it is for."
            )
        for name in ("token", "use_auth_token"):
            if name in (self.model_kwargs or {}):
                raise ValueError(
                    f"{owner}(model_kwargs=...) holds {name!r}, which would end up in every checkpoint. "
                    "Set the environment variable HF_TOKEN instead."
                )
        if self.engine is not None and not isinstance(self.engine, GenerationEngine):
            raise ValueError(f"{owner}(engine={self.engine!r}) is no GenerationEngine. Give an object of such a class.")
        if self.max_prompt_tokens is not None:
            check_whole(1, owner, max_prompt_tokens=self.max_prompt_tokens)

    def _check_loaded(self, models: list[Any], argument: str) -> None:
        loaded = [model for model in models if not is_name(model)]
        if not loaded:
            return
        for name, value in (("dtype", self.dtype), ("model_kwargs", self.model_kwargs)):
            if value is not None:
                raise ValueError(
                    f"{type(self).__name__}({name}={value!r}) cannot apply to a model that is already loaded. "
                    f"Pass {argument} by name or folder, or leave {name} out."
                )


def _agent_folders(folder: str | Path, num_agents: int) -> list[str]:
    """The agents' folders inside the one that `save_agents` wrote."""
    folders = [Path(folder) / f"agent_{agent}" for agent in range(num_agents)]
    if missing := [path.name for path in folders if not path.is_dir()]:
        raise ValueError(
            f"SharedBase(adapters={str(folder)!r}) holds no folder {missing[0]!r}. Give the folder that save_agents "
            "wrote, or a list with one folder per agent."
        )
    return [str(path) for path in folders]


@document_fields
@dataclass(frozen=True)
class SharedBase(TeamSettings):
    """One frozen language model for all agents, one LoRA adapter per agent.

    A loaded model is taken over: adapters are added to it, its weights are frozen, its dropout is switched off.
    """

    model: str | Any
    """Hub name, local folder or loaded `PreTrainedModel`."""
    num_agents: int
    """Number of agents."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Shape of the adapters; unused when `adapters` are loaded."""
    adapters: list[str] | str | None = None
    """Adapter folders to go on from: one per agent, or the folder that `save_agents` wrote them into."""
    tokenizer: str | Any | None = None
    """Name, folder or loaded tokenizer; None takes the model's. Required with a loaded model."""

    def __post_init__(self) -> None:
        self._check_common()
        check_whole(1, "SharedBase", num_agents=self.num_agents)
        self._check_loaded([self.model], "model")
        if not is_name(self.model) and self.tokenizer is None:
            raise ValueError("SharedBase(model=...) is a loaded model without a tokenizer. Pass tokenizer= too.")
        if not isinstance(self.lora, LoraSettings):
            raise ValueError(
                f"SharedBase(lora={self.lora!r}) is not a LoraSettings. Agents that share a base need adapters; "
                "use Separate(models=[...]) for full fine-tuning."
            )
        self._check_adapters()

    def _check_adapters(self) -> None:
        if self.adapters is None:
            return
        if isinstance(self.adapters, str | Path):
            _agent_folders(self.adapters, 1)  # the first one is needed by any team, more are for `of_size` to find
        elif not isinstance(self.adapters, list | tuple):
            raise ValueError(f"SharedBase(adapters={self.adapters!r}) is no list. Give folders, one per agent.")
        elif len(self.adapters) != self.num_agents:
            raise ValueError(
                f"SharedBase(adapters=...) holds {len(self.adapters)} folders for num_agents={self.num_agents}. "
                "Give one per agent."
            )

    def of_size(self, num_models: int) -> SharedBase:
        """The same for a team of so many language models, with a list of their adapter folders.

        Args:
            num_models: Language models of the team: one per agent, or a single one that answers for all.

        Raises:
            ValueError: If `adapters` is a folder that lacks one of theirs.
        """
        if isinstance(self.adapters, str | Path):
            return replace(self, num_agents=num_models, adapters=_agent_folders(self.adapters, num_models))
        return replace(self, num_agents=num_models, adapters=self.adapters and self.adapters[:num_models])


@document_fields
@dataclass(frozen=True)
class Separate(TeamSettings):
    """A language model of its own for every agent: other architectures, vocabularies, sizes, or full fine-tuning.

    Loaded models are taken over: their dropout is switched off, and under `lora` their weights are frozen.
    """

    models: list[Any]
    """Hub names, local folders (adapter folders too) or loaded `PreTrainedModel` objects, one per agent."""
    lora: LoraSettings | None = None
    """Shape of the adapters; None trains all weights. Adapter folders go on training the adapter they hold."""
    tokenizers: list[Any] | None = None
    """Names, folders or loaded tokenizers, one per agent; None takes the models'. Required with loaded models."""

    def __post_init__(self) -> None:
        self._check_common()
        if not isinstance(self.models, list | tuple) or not self.models:
            given = repr(self.models) if is_name(self.models) or not self.models else f"<{type(self.models).__name__}>"
            raise ValueError(f"Separate(models={given}) is no list of models. Give a list, one model per agent.")
        if self.lora is not None and not isinstance(self.lora, LoraSettings):
            raise ValueError(
                f"Separate(lora={self.lora!r}) is not a LoraSettings. Give LoraSettings(...), or None for all weights."
            )
        if self.tokenizers is not None and not isinstance(self.tokenizers, list | tuple):
            raise ValueError(f"Separate(tokenizers={self.tokenizers!r}) is no list. Give one tokenizer per agent.")
        self._check_loaded(list(self.models), "models")
        if self.tokenizers is not None and len(self.tokenizers) != len(self.models):
            raise ValueError(
                f"Separate(tokenizers=...) holds {len(self.tokenizers)} tokenizers for {len(self.models)} models. "
                "Give one per agent."
            )
        loaded = [(agent, model) for agent, model in enumerate(self.models) if not is_name(model)]
        for agent, _ in loaded:
            if self.tokenizers is None or self.tokenizers[agent] is None:
                raise ValueError(
                    f"Separate(models=...) holds a loaded model for agent_{agent} without a tokenizer. "
                    "Pass tokenizers=[...], one per agent."
                )
        for position, (agent, model) in enumerate(loaded):
            for other, candidate in loaded[:position]:
                if candidate is model:
                    raise ValueError(
                        f"Separate(models=...) holds the same loaded model for agent_{other} and agent_{agent}. "
                        "Pass copies, or SharedBase for agents that share weights."
                    )

    @property
    def num_agents(self) -> int:
        """Number of agents."""
        return len(self.models)
