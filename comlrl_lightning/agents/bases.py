"""Fingerprints of the base models, so that adapters are not loaded onto a different base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comlrl_lightning.agents.fingerprints import config_hash, is_same_sample, may_move
from comlrl_lightning.agents.settings import Separate, SharedBase, is_name
from comlrl_lightning.agents.team import AgentTeam


def bases_of(agents: SharedBase | Separate, team: AgentTeam) -> list[dict[str, Any]]:
    """`[N]` the language model under each agent: its name, kind, a hash of its configuration, a sample of its weights.

    The sample is empty where the agent trains all of them.

    Args:
        agents: The models as the user named them.
        team: The loaded models.
    """
    given = [agents.model] * team.num_agents if isinstance(agents, SharedBase) else list(agents.models)
    models = [team.speaker(agent) for agent in range(team.num_agents)]
    return [
        {
            "name": str(one) if is_name(one) else str(model.causal.config.name_or_path),
            "kind": type(model.causal).__name__,
            "config": config_hash(model.causal.config),
            "weights": model.base_sample,
        }
        for one, model in zip(given, models, strict=True)
    ]


def check_bases(saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]) -> None:
    """Refuse weights that were trained on other models. A folder may have moved.

    Args:
        saved: `[N]` what `bases_of` gave when the checkpoint was saved.
        current: The same of this module.

    Raises:
        ValueError: If an agent has another model than in the checkpoint; it names both.
    """
    different = [agent for agent, pair in enumerate(zip(saved, current, strict=False)) if not _is_same(*pair)]
    if not different and len(saved) == len(current):
        _check_weights(saved, current)
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


def _check_weights(saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]) -> None:
    for agent, (former, present) in enumerate(zip(saved, current, strict=True)):
        if "weights" in former and not is_same_sample(former["weights"], present["weights"]):
            raise ValueError(
                f"agent_{agent} was trained on {_described(former)}, which has other weights here; those of new tokens"
                " are random after resize_token_embeddings. Load the weights that the run began with: save such a model"
                " once by save_pretrained, and load it from there."
            )


def _is_same(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    if (saved["kind"], saved["config"]) != (current["kind"], current["config"]):
        return False
    return saved["name"] == current["name"] or may_move(saved["name"]) or may_move(current["name"])


def _described(base: Mapping[str, Any]) -> str:
    return f"{base['name'] or 'a loaded model'} ({base['kind']}, configuration {base['config']})"
