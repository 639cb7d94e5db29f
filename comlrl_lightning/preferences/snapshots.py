"""Trained weights of a team at another time: copies of them, and agents that speak with such copies for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from comlrl_lightning.agents.team import AgentTeam


def weights_of(team: AgentTeam) -> dict[str, Tensor]:
    """Copies of all agents' trained weights on the CPU, by their names in `AgentTeam.agent_parameters`."""
    return {name: parameter.detach().cpu().clone() for name, parameter in _parameters(team).items()}


@contextmanager
def borrowed_weights(team: AgentTeam, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the agents speak with other weights; their own come back untouched, after exceptions too.

    Args:
        team: Whose weights are put aside, not copied: their storage is as it was afterwards.
        weights: What `weights_of` made of the same agents, anywhere and in any dtype.

    Raises:
        ValueError: The weights are those of other agents.
    """
    parameters = _parameters(team)
    _check(parameters, weights)
    # Every copy is made before the first agent changes its voice: a device may run out of memory on the way.
    lent = {
        name: weights[name].to(device=parameter.device, dtype=parameter.dtype) for name, parameter in parameters.items()
    }
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = lent[name]
        team.mark_changed()
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
        team.mark_changed()


def _parameters(team: AgentTeam) -> dict[str, nn.Parameter]:
    return {
        name: parameter for agent in range(team.num_agents) for name, parameter in team.agent_parameters(agent).items()
    }


def _check(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    if differing := sorted(parameters.keys() ^ weights.keys()):
        raise ValueError(
            f"weights=... and the agents differ in {len(differing)} names, the first is {differing[0]!r}. "
            "Give the weights of these agents, as weights_of returns them."
        )
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(
                f"weights=... holds {name!r} with shape {tuple(weights[name].shape)}, but the agents' has shape "
                f"{tuple(parameter.shape)}. Give the weights of these agents, as weights_of returns them."
            )
