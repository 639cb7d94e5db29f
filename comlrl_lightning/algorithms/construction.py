"""The user's functions, from an algorithm's arguments to checked calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comlrl_lightning.algorithms.checks import check_flag
from comlrl_lightning.algorithms.hparams import callable_from_plain
from comlrl_lightning.interface import Formatters, RewardFunction, Transition
from comlrl_lightning.rollouts.collect import TaskInterface

FUNCTION_ARGUMENTS = ("formatters", "reward_func", "reward_processor", "external_transition")
"""Arguments that are functions, which a checkpoint holds as import paths."""


def task_interface(given: Mapping[str, Any], num_agents: int) -> TaskInterface:
    """Put the user's functions behind checked calls.

    Args:
        given: Arguments of the algorithm's constructor, by name.
        num_agents: N.

    Raises:
        ValueError: If a function does not fit, or several turns have no transition.
    """
    check_flag(external_prompt_passthrough=given["external_prompt_passthrough"])
    functions = {name: callable_from_plain(name, given[name]) for name in FUNCTION_ARGUMENTS}
    transition = functions["external_transition"]
    if given["num_turns"] > 1 and transition is None:
        raise ValueError(
            f"num_turns={given['num_turns']} needs prompts for the turns after the first. Give external_transition."
        )
    return TaskInterface(
        Formatters(functions["formatters"], num_agents),
        RewardFunction(functions["reward_func"], num_agents, functions["reward_processor"]),
        None if transition is None else Transition(transition, num_agents),
        given["external_prompt_passthrough"],
    )
