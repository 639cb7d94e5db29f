"""Which language models a checkpoint belongs to: on others, or on another agent's, its adapters mean nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_lightning.agents.settings import SharedBase, is_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from comlrl_lightning.algorithms.module import CooperativeModule

MEANINGLESS = (
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Entries of a model's configuration that change neither its weights nor what they mean."""


def bases_of(module: CooperativeModule) -> list[dict[str, str]]:
    """`[N]` the language model under each agent: its name, its kind and a hash of its configuration."""
    agents = module.agents
    given = [agents.model] * module.team_size if isinstance(agents, SharedBase) else list(agents.models)
    models = [module.team.speaker(agent).causal for agent in range(module.team_size)]
    return [
        {
            "name": str(one) if is_name(one) else str(model.config.name_or_path),
            "kind": type(model).__name__,
            "config": config_hash(model.config),
        }
        for one, model in zip(given, models, strict=True)
    ]


def config_hash(config: PreTrainedConfig) -> str:
    """Twelve hexadecimal digits that differ between models of different shapes or settings."""
    text = json.dumps(_meaningful(config.to_diff_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_bases(saved: Sequence[Mapping[str, str]], current: Sequence[Mapping[str, str]]) -> None:
    """Refuse weights that were trained on other models. A folder may have moved.

    Args:
        saved: `[N]` what `bases_of` gave when the checkpoint was saved.
        current: The same of this module.

    Raises:
        ValueError: If an agent has another model than in the checkpoint; it names both.
    """
    different = [agent for agent, pair in enumerate(zip(saved, current, strict=False)) if not _is_same(*pair)]
    if not different and len(saved) == len(current):
        return
    if len(saved) != len(current):
        raise ValueError(
            f"The checkpoint is of {len(saved)} language models, this module has {len(current)}. Use the agents="
            " settings that it was saved with."
        )
    if sorted(map(_described, saved)) == sorted(map(_described, current)):
        orders = [", ".join(map(_described, bases)) for bases in (saved, current)]
        raise ValueError(
            f"The agents are in another order: the checkpoint's are {orders[0]}, this module's are {orders[1]}. Give"
            " agents= in the checkpoint's order."
        )
    agent = different[0]
    raise ValueError(
        f"agent_{agent} was trained on {_described(saved[agent])}, but here it stands on {_described(current[agent])},"
        " where its weights mean nothing. Use the agents= settings that the checkpoint was saved with."
    )


def _is_same(saved: Mapping[str, str], current: Mapping[str, str]) -> bool:
    if (saved["kind"], saved["config"]) != (current["kind"], current["config"]):
        return False
    return saved["name"] == current["name"] or _may_move(saved["name"]) or _may_move(current["name"])


def _may_move(name: str) -> bool:
    """Whether a name is that of a folder, or of nothing; the hub's names stay."""
    return not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _described(base: Mapping[str, str]) -> str:
    return f"{base['name'] or 'a loaded model'} ({base['kind']}, configuration {base['config']})"


def _meaningful(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {str(key): _meaningful(entry) for key, entry in value.items() if key not in MEANINGLESS and key[:1] != "_"}
