"""From descriptions of critics to what lies below their heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_lightning.agents.adapter_folders import load_adapter, load_adapters
from comlrl_lightning.agents.adapters import Adapters
from comlrl_lightning.agents.language_model import LanguageModel, adapter_name
from comlrl_lightning.agents.layer_names import check_layer_names
from comlrl_lightning.agents.loading import (
    adapter_config,
    adapters_base,
    check_tokenizer,
    load_base,
    load_tokenizer,
    lora_config,
    new_adapters,
)
from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.agents.settings import LoraSettings, is_name
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.critics import HEAD_FILE, CriticBody, CriticTeam, CriticType
from comlrl_lightning.critics.inputs import CriticReader, Reading
from comlrl_lightning.critics.settings import (
    AdapterCritic,
    CriticSettings,
    ModelCritic,
    ValueHead,
    check_critic,
)
from comlrl_lightning.utilities.quiet import without_noise

if TYPE_CHECKING:
    from peft import LoraConfig


def build_critics(
    settings: CriticSettings,
    team: AgentTeam,
    *,
    centralized: bool,
    critic_type: CriticType = "v",
    num_outputs: int = 1,
    name: str = "critic",
    freeze_backbone: bool = False,
) -> CriticTeam:
    """Load or make the critics that the settings describe; call it once per team.

    Args:
        settings: Kind of critic.
        team: The agents; an `AdapterCritic` adds adapters to their models.
        centralized: One critic that reads all agents instead of one per agent that reads its own.
        critic_type: "v" reads prompts, "q" prompts and completions.
        num_outputs: Values per joint completion of a central critic.
        name: Of a central critic, its adapter, parameter group and folder; of several with ``_0``, ... behind it.
        freeze_backbone: Train the heads alone.

    Raises:
        ValueError: The settings do not fit the team.
    """
    bodies = load_bodies(settings, team, centralized, critic_type == "q", name, freeze_backbone)
    of_team = [team.speaker(agent) for agent in range(team.num_agents)]
    own_models = [body.model for body in bodies if body.model not in of_team]
    return CriticTeam(
        bodies,
        list(dict.fromkeys(own_models)),
        centralized=centralized,
        num_outputs=num_outputs,
        hidden_size=settings.hidden_size,
    )


def load_bodies(
    settings: CriticSettings,
    team: AgentTeam,
    centralized: bool,
    with_completions: bool,
    name: str = "critic",
    freeze: bool = False,
) -> list[CriticBody]:
    """What lies below the heads of the critics: one per agent, or a single one.

    Args:
        settings: What the critics are.
        team: The agents.
        centralized: One critic that reads all agents.
        with_completions: Whether the critics read completions too.
        name: Of a single critic; of several with ``_0``, ... behind it.
        freeze: Train nothing below the heads.

    Raises:
        ValueError: The settings do not fit the team.
    """
    check_critic(settings, team.num_agents, centralized)
    names = [name] if centralized else [f"{name}_{agent}" for agent in range(team.num_agents)]
    if isinstance(settings, ValueHead):
        assert not freeze, "what is below these heads is the agents' own"
        return _agents_themselves(settings, team, names, with_completions)
    if isinstance(settings, AdapterCritic):
        bodies = _adapters_of_team(settings, team, names, centralized, with_completions, freeze)
    else:
        bodies = _models(settings, names, centralized, with_completions, freeze)
    if centralized and with_completions:
        bodies[0].reader.check_room(team.num_agents)
    return bodies


def _agents_themselves(
    settings: ValueHead, team: AgentTeam, names: Sequence[str], with_completions: bool
) -> list[CriticBody]:
    bodies = []
    for agent, name in enumerate(names):
        model = team.speaker(agent)
        adapter = None if model.adapters is None else adapter_name(agent)
        folder = None if settings.heads is None else settings.heads[agent]
        reader = _reader(name, model, "tokens", with_completions)
        bodies.append(CriticBody(name, model, reader, adapter, True, folder))
    return bodies


def _adapters_of_team(
    settings: AdapterCritic,
    team: AgentTeam,
    names: Sequence[str],
    centralized: bool,
    with_completions: bool,
    freeze: bool,
) -> list[CriticBody]:
    reading: Reading = "joint" if centralized else "tokens"
    bodies = []
    for agent, name in enumerate(names):
        model = team.speaker(agent)
        if model.adapters is None:
            raise ValueError(
                f"critic=AdapterCritic() needs a frozen model under it, but agent_{agent} trains all weights of its "
                "own. Give Separate(lora=LoraSettings()), or use ModelCritic(model=...)."
            )
        folder = None if settings.adapters is None else settings.adapters[agent]
        if folder is None:
            with without_noise():
                model.adapters.network.add_adapter(
                    name, _beside_agents(settings.lora or LoraSettings(), model.adapters)
                )
        else:
            load_adapter(model.adapters.network, name, str(folder))
        model.include_adapter(name, trained=not freeze)
        reader = _reader(name, model, reading, with_completions, settings.max_tokens)
        bodies.append(CriticBody(name, model, reader, name, False, folder))
    if settings.lora is not None and settings.adapters is None:
        check_layer_names("AdapterCritic(lora=LoraSettings", settings.lora, [body.model.causal for body in bodies])
    return bodies


def _beside_agents(lora: LoraSettings, adapters: Adapters) -> LoraConfig:
    """An adapter that leaves alone the layers that agents have copied for themselves."""
    config = lora_config(lora)
    if config.exclude_modules is None and adapters.copies_layers:
        config.exclude_modules = r".*\.modules_to_save\..*"
    return config


def _models(
    settings: ModelCritic, names: Sequence[str], centralized: bool, with_completions: bool, freeze: bool
) -> list[CriticBody]:
    reading: Reading = "joint" if centralized else "text"
    if settings.models is not None:
        tokenizers = settings.tokenizers or [None] * len(names)
        loaded = [
            _load(settings, *entry, freeze)
            for entry in zip(settings.models, tokenizers, [[name] for name in names], strict=True)
        ]
        folders = [_head_folder(model) for model in settings.models]
    elif settings.lora is not None and adapter_config(settings.model) is None:
        # One frozen model under the adapters of all critics.
        loaded = [_load(settings, settings.model, settings.tokenizer, names, freeze)] * len(names)
        folders = [_head_folder(settings.model)] * len(names)
    else:
        loaded = [_load(settings, settings.model, settings.tokenizer, [name], freeze) for name in names]
        folders = [_head_folder(settings.model)] * len(names)
    given = [settings.model] * len(names) if settings.models is None else settings.models
    fresh = [model.causal for model, name in zip(loaded, given, strict=True) if adapter_config(name) is None]
    if settings.lora is not None and fresh:
        check_layer_names("ModelCritic(lora=LoraSettings", settings.lora, fresh)
    return [
        CriticBody(
            name,
            model,
            _reader(name, model, reading, with_completions, settings.max_tokens),
            None if model.adapters is None else name,
            False,
            folder,
        )
        for name, model, folder in zip(names, loaded, folders, strict=True)
    ]


def _load(settings: ModelCritic, model: Any, tokenizer: Any, names: Sequence[str], freeze: bool) -> LanguageModel:
    """The model of a critic, or of several that have an adapter each on it."""
    source = model
    if (config := adapter_config(model)) is not None:
        owner = f"ModelCritic(...): the adapter folder {str(model)!r}"
        base, source = adapters_base(settings, config, model, owner, needs_head=False)
        network = load_adapters(base, {name: str(model) for name in names}, shared=len(names) > 1)
    else:
        trains_all = settings.lora is None and not freeze
        dtype = settings.dtype or ("float32" if trains_all else "auto")
        base = load_base(settings, model, dtype, ", ".join(names), needs_head=False)
        network = base.requires_grad_(True) if settings.lora is None else new_adapters(base, settings.lora, [*names])
    own_tokenizer = load_tokenizer(source if tokenizer is None else tokenizer)
    loaded = LanguageModel(network, own_tokenizer, [], PromptEncoder(own_tokenizer), names=names)
    check_tokenizer(loaded, "the critic")
    if loaded.adapters is None:
        _freeze_head(loaded)
    if freeze:
        loaded.requires_grad_(False)
    if settings.gradient_checkpointing:
        loaded.checkpoint_activations()
    return loaded


def _freeze_head(model: LanguageModel) -> None:
    """Leave out of training what makes logits, which a critic does not use, unless it embeds the tokens too."""
    head = model.causal.get_output_embeddings()
    if head.weight is not model.causal.get_input_embeddings().weight:
        head.requires_grad_(False)


def _head_folder(model: Any) -> str | None:
    return str(model) if is_name(model) and Path(str(model), HEAD_FILE).is_file() else None


def _reader(
    name: str, model: LanguageModel, reading: Reading, with_completions: bool, max_tokens: int | None = None
) -> CriticReader:
    limits = [limit for limit in (max_tokens, model.max_positions) if limit is not None]
    return CriticReader(model.tokenizer, reading, with_completions, min(limits, default=None), name)
