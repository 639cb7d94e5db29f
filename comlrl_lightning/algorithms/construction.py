"""The user's functions, from an algorithm's arguments to checked calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comlrl_lightning.agents.settings import Separate, SharedBase
from comlrl_lightning.environment.joint_format import JointFormat, joint_format_of
from comlrl_lightning.environment.prompts import Formatters, RewardFunction, Transition
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.rollouts.collect import TaskInterface
from comlrl_lightning.utilities.checks import check_choice, check_flag
from comlrl_lightning.utilities.plain import callable_from_plain, from_plain

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
    names = ("reward_workers", "reward_backend", "reward_timeout_seconds", "reward_timeout_value")
    workers = RewardWorkers(*(given[name] for name in names))
    check_choice(("error", "skip"), reward_none=given["reward_none"])
    skips = given["reward_none"] == "skip"
    reward = RewardFunction(functions["reward_func"], num_agents, functions["reward_processor"], none_as_nan=skips)
    workers.check(reward)
    return TaskInterface(
        Formatters(functions["formatters"], num_agents),
        reward,
        None if transition is None else Transition(transition, num_agents),
        given["external_prompt_passthrough"],
        joint_format(given["collaboration"], given["agents"]),
        workers,
    )


def joint_format(collaboration: Any, agents: Any) -> JointFormat | None:
    """How one language model answers for all agents; None where each answers by itself.

    Raises:
        ValueError: If it is neither a known name nor a format, or the agents are separate models.
    """
    given = joint_format_of(from_plain("collaboration", collaboration))
    if given is not None and isinstance(from_plain("agents", agents), Separate):
        raise ValueError(
            f"collaboration={collaboration!r} is one model that answers for all, but agents=Separate(...) are several."
            " Use SharedBase(model, num_agents=N), which counts the answers."
        )
    return given


def team_settings(agents: SharedBase | Separate, joint_format: JointFormat | None) -> SharedBase | Separate:
    """The settings of the language models that answer: a single one where it answers for all.

    Args:
        agents: As the user wrote them, with one agent per answer.
        joint_format: How one model answers for all; None where each agent answers by itself.

    Raises:
        ValueError: If a folder of adapters lacks that of a model.
    """
    if isinstance(agents, Separate):
        return agents
    return agents.of_size(agents.num_agents if joint_format is None else 1)
