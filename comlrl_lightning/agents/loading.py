"""From descriptions to loaded language models."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from comlrl_lightning.agents.adapter_folders import load_adapters
from comlrl_lightning.agents.decoding.engines import LOOPS
from comlrl_lightning.agents.language_model import LanguageModel, adapter_name
from comlrl_lightning.agents.layer_names import check_layer_names
from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.agents.settings import LoraSettings, Separate, SharedBase, TeamSettings, is_name
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.assets import STORY_MODEL, story_model_path
from comlrl_lightning.utilities.quiet import without_noise
from comlrl_lightning.utilities.whole_weights import check_report

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadSettings(Protocol):
    """The settings of a model that loading reads."""

    @property
    def dtype(self) -> str | None:
        """Number format of the weights."""
        ...

    @property
    def model_kwargs(self) -> dict[str, Any] | None:
        """More arguments for `from_pretrained`."""
        ...


def build_team(settings: SharedBase | Separate) -> AgentTeam:
    """Load the weights that the settings describe."""
    return AgentTeam(load_models(settings), LOOPS, settings.engine)


def load_models(settings: SharedBase | Separate) -> list[LanguageModel]:
    """One language model for a shared base, one per agent otherwise."""
    if isinstance(settings, SharedBase):
        return [_load_shared(settings)]
    models = [_load_separate(settings, agent) for agent in range(settings.num_agents)]
    # Models of several kinds may share settings: a name must be one in any of those that get new adapters.
    fresh = [one.causal for one, given in zip(models, settings.models, strict=True) if adapter_config(given) is None]
    if settings.lora is not None and fresh:
        check_layer_names("Separate(lora=LoraSettings", settings.lora, fresh)
    return models


def located(model: Any) -> Any:
    """The folder of a model or tokenizer that the package brings along; anything else stays what it is.

    Raises:
        ValueError: If it is written as a folder, and there is none.
    """
    if not is_name(model):
        return model
    name = str(model)
    if name == STORY_MODEL:
        return str(story_model_path())
    looks_like_folder = isinstance(model, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_folder and not Path(name).exists():
        raise ValueError(f"The model {name!r} is neither a folder nor a hub name. Correct the path.")
    return _absolute(name) if Path(name).is_dir() else name


def _load_shared(settings: SharedBase) -> LanguageModel:
    settings = settings.of_size(settings.num_agents)
    model = located(settings.model)
    if adapter_config(model) is not None:
        raise ValueError(
            f"SharedBase(model={str(settings.model)!r}) is an adapter folder. Pass its base model, "
            "and the folder in adapters=[...], once per agent."
        )
    base = load_base(settings, model, settings.dtype or "auto", "all agents")
    agents = range(settings.num_agents)
    if settings.adapters is None:
        check_layer_names("SharedBase(lora=LoraSettings", settings.lora, [base])
        network = new_adapters(base, settings.lora, [adapter_name(agent) for agent in agents])
    else:
        folders = {adapter_name(agent): folder for agent, folder in zip(agents, settings.adapters, strict=True)}
        network = load_adapters(base, folders, shared=True)
    tokenizer = load_tokenizer(model if settings.tokenizer is None else settings.tokenizer)
    return _language_model(settings, network, tokenizer, agents, loaded=settings.adapters is not None)


def _load_separate(settings: Separate, agent: int) -> LanguageModel:
    model, name = located(settings.models[agent]), adapter_name(agent)
    given = None if settings.tokenizers is None else settings.tokenizers[agent]
    if (config := adapter_config(model)) is not None:
        owner = f"Separate(models=...): the adapter folder {str(model)!r} of {name}"
        base, source = adapters_base(settings, config, model, owner)
        network = load_adapters(base, {name: str(model)}, shared=False)
        return _language_model(settings, network, load_tokenizer(given or source), [agent], loaded=True)
    base = load_base(settings, model, settings.dtype or ("float32" if settings.lora is None else "auto"), name)
    network = base.requires_grad_(True) if settings.lora is None else new_adapters(base, settings.lora, [name])
    return _language_model(settings, network, load_tokenizer(model if given is None else given), [agent], loaded=False)


def _language_model(
    settings: TeamSettings,
    network: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    agents: Any,
    *,
    loaded: bool,
) -> LanguageModel:
    prompts = PromptEncoder(
        tokenizer,
        settings.chat_template_kwargs,
        settings.max_prompt_tokens,
        settings.long_prompts,
        settings.special_tokens,
        is_formatted=True,
    )
    reference = ("initial" if loaded else "base") if settings.reference == "auto" else settings.reference
    model = LanguageModel(network, tokenizer, list(agents), prompts, reference)
    check_tokenizer(model, f"agent_{model.agents[0]}")
    if settings.gradient_checkpointing:
        model.checkpoint_activations()
    return model


def check_tokenizer(model: LanguageModel, owner: str) -> None:
    """Refuse a tokenizer with more tokens than its model.

    Raises:
        ValueError: It has more.
    """
    if len(model.tokenizer) > model.vocabulary_size:
        raise ValueError(
            f"The tokenizer of {owner} has {len(model.tokenizer)} tokens, its model only "
            f"{model.vocabulary_size}. Pass the tokenizer that belongs to the model, or resize the model's embeddings."
        )


def load_base(
    settings: LoadSettings, model: Any, dtype: str, owner: str, *, needs_head: bool = True
) -> PreTrainedModel:
    """A model by name or folder, or a loaded one that nobody has taken over.

    Args:
        settings: Whose model it is.
        model: Name, folder or loaded model.
        dtype: Number format of a model by name.
        owner: Who stands on it, for messages.
        needs_head: Whether its head must come with it.

    Raises:
        ValueError: It is no model, carries adapters, or was saved in part.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import AutoModelForCausalLM, PreTrainedModel

    if is_name(model):
        arguments = {"dtype": dtype, **(settings.model_kwargs or {}), "output_loading_info": True}
        loaded, report = AutoModelForCausalLM.from_pretrained(located(model), **arguments)
        without = [] if needs_head else _head_names(loaded)
        check_report(f"The model of {owner}, {str(model)!r},", loaded, report, without)
        return loaded
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(settings).__name__} got a model of type {type(model).__name__}. "
            "Pass a name, a folder or a transformers PreTrainedModel."
        )
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"{type(settings).__name__} got a loaded {type(model).__name__} that carries adapters already, perhaps "
            "because another module took it over. Load a fresh one, or pass its name or folder."
        )
    if Path(model.name_or_path).is_dir():  # adapters are saved with this name, and loaded from anywhere
        model.name_or_path = _absolute(model.name_or_path)
    return model


def _head_names(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    own = [] if head is None else [*map(id, head.parameters())]
    return [name for name, parameter in model.named_parameters() if id(parameter) in own]


def _absolute(folder: str | Path) -> str:
    return os.path.abspath(folder)


def load_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase:
    """A tokenizer by name or folder, or the loaded one."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(located(tokenizer)) if is_name(tokenizer) else tokenizer


def adapter_config(model: Any) -> PeftConfig | None:
    """The PEFT configuration of an adapter folder or hub name, None for anything else."""
    from peft import PeftConfig
    from transformers.utils import find_adapter_config_file

    if not is_name(model) or find_adapter_config_file(str(model)) is None:
        return None
    return PeftConfig.from_pretrained(str(model))


def adapters_base(
    settings: LoadSettings, config: PeftConfig, folder: Any, owner: str, *, needs_head: bool = True
) -> tuple[PreTrainedModel, Any]:
    """The base model of an adapter folder, and where its tokenizer is: in the folder or at the base.

    Args:
        settings: Whose model it is.
        config: The adapter's configuration.
        folder: The adapter folder, or its name.
        owner: Whose it is, for messages.
        needs_head: Whether the base's head must come with it.

    Raises:
        ValueError: The folder does not name its base, or there is no such model.
    """
    base_name = config.base_model_name_or_path
    if not base_name:
        raise ValueError(
            f"{owner} does not say which model it belongs to. Set base_model_name_or_path in its adapter_config.json."
        )
    try:
        base = load_base(settings, base_name, settings.dtype or "auto", owner, needs_head=needs_head)
    except (OSError, ValueError) as error:
        advice = "" if Path(base_name).is_absolute() else " A relative path counts from the working folder."
        raise ValueError(
            f"{owner} stands on base_model_name_or_path={base_name!r}, which cannot be loaded here: {error}{advice}"
            " Correct it in its adapter_config.json."
        ) from error
    return base, folder if Path(folder, "tokenizer_config.json").is_file() else base_name


def new_adapters(base: PreTrainedModel, lora: LoraSettings, names: list[str]) -> PeftModel:
    """A model with new adapters of one shape."""
    from peft import get_peft_model

    with without_noise():
        network = get_peft_model(base, lora_config(lora), adapter_name=names[0])
        for name in names[1:]:
            network.add_adapter(name, deepcopy(network.peft_config[names[0]]))
    return network


def lora_config(lora: LoraSettings) -> LoraConfig:
    """PEFT's form of the settings of an adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        modules_to_save=lora.modules_to_save,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        task_type="CAUSAL_LM",
    )
