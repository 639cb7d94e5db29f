"""From descriptions to loaded language models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_lightning.agents.decoding.engines import LOOPS
from comlrl_lightning.agents.language_model import LanguageModel, adapter_name
from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.agents.settings import LoraSettings, Separate, SharedBase, TeamSettings, is_name
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.assets import STORY_MODEL, story_model_path
from comlrl_lightning.critics.settings import ModelCritic

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def build_team(settings: SharedBase | Separate) -> AgentTeam:
    """Load the weights that the settings describe."""
    return AgentTeam(load_models(settings), LOOPS, settings.engine)


def load_models(settings: SharedBase | Separate) -> list[LanguageModel]:
    """One language model for a shared base, one per agent otherwise."""
    if isinstance(settings, SharedBase):
        return [_load_shared(settings)]
    return [_load_separate(settings, agent) for agent in range(settings.num_agents)]


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
    return name


def _load_shared(settings: SharedBase) -> LanguageModel:
    settings = settings.of_size(settings.num_agents)
    model = located(settings.model)
    if adapter_config(model) is not None:
        raise ValueError(
            f"SharedBase(model={str(settings.model)!r}) is an adapter folder. Pass its base model, "
            "and the folder in adapters=[...], once per agent."
        )
    base = load_base(settings, model, settings.dtype or "auto")
    agents = range(settings.num_agents)
    if settings.adapters is None:
        network = new_adapters(base, settings.lora, [adapter_name(agent) for agent in agents])
    else:
        network = load_adapters(base, {adapter_name(a): f for a, f in zip(agents, settings.adapters, strict=True)})
    tokenizer = load_tokenizer(model if settings.tokenizer is None else settings.tokenizer)
    return _language_model(settings, network, tokenizer, agents, loaded=settings.adapters is not None)


def _load_separate(settings: Separate, agent: int) -> LanguageModel:
    model, name = located(settings.models[agent]), adapter_name(agent)
    given = None if settings.tokenizers is None else settings.tokenizers[agent]
    if (config := adapter_config(model)) is not None:
        base_name, source = adapters_base(
            config, model, f"Separate(models=...): the adapter folder {str(model)!r} of {name}"
        )
        network = load_adapters(load_base(settings, base_name, settings.dtype or "auto"), {name: str(model)})
        return _language_model(settings, network, load_tokenizer(given or source), [agent], loaded=True)
    base = load_base(settings, model, settings.dtype or ("float32" if settings.lora is None else "auto"))
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
    prompts = PromptEncoder(tokenizer, settings.chat_template_kwargs, settings.max_prompt_tokens, settings.long_prompts)
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


def load_base(settings: TeamSettings | ModelCritic, model: Any, dtype: str) -> PreTrainedModel:
    """A model by name or folder, or a loaded one that nobody has taken over.

    Raises:
        ValueError: It is no model, or carries adapters.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import AutoModelForCausalLM, PreTrainedModel

    if is_name(model):
        arguments = {"dtype": dtype, **(settings.model_kwargs or {})}
        return AutoModelForCausalLM.from_pretrained(located(model), **arguments)
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
    return model


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


def adapters_base(config: PeftConfig, folder: Any, owner: str) -> tuple[str, Any]:
    """The base model of an adapter folder, and where its tokenizer is: in the folder or at the base.

    Raises:
        ValueError: The folder does not name its base.
    """
    base_name = config.base_model_name_or_path
    if not base_name:
        raise ValueError(
            f"{owner} does not say which model it belongs to. Set base_model_name_or_path in its adapter_config.json."
        )
    return base_name, folder if Path(folder, "tokenizer_config.json").is_file() else base_name


def new_adapters(base: PreTrainedModel, lora: LoraSettings, names: list[str]) -> PeftModel:
    """A model with new adapters of one shape."""
    from peft import get_peft_model

    with without_noise():
        network = get_peft_model(base, lora_config(lora), adapter_name=names[0])
        for name in names[1:]:
            network.add_adapter(name, deepcopy(network.peft_config[names[0]]))
    return network


@contextmanager
def without_noise() -> Iterator[None]:
    """Silence what PEFT says about its own inner workings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        yield


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


def load_adapters(base: PreTrainedModel, folders: dict[str, str]) -> PeftModel:
    """A model with adapters from folders, by name."""
    from peft import PeftConfig, PeftModel

    (first, folder), *others = folders.items()
    for path in folders.values():
        if PeftConfig.from_pretrained(str(path)).is_prompt_learning:
            raise ValueError(f"The adapter {path!r} learns prompts, which is not supported. Use a LoRA adapter.")
    with without_noise():
        network = PeftModel.from_pretrained(base, str(folder), adapter_name=first, is_trainable=True)
        for name, path in others:
            network.load_adapter(str(path), name, is_trainable=True)
    return network
