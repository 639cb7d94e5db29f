"""One model that answers for all agents: how it is asked, and how its completion becomes the agents' answers.

Agents that answer one by one are "decentralized". In "centralized" collaboration a single model reads the prompts of
all N agents as one prompt and writes all N answers in one completion; a `JointFormat` makes the prompt and splits the
completion. Rewards, transitions, evaluation and predictions see N prompts and N answers in both cases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from comlrl_lightning.environment.prompts import checked_prompt
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.types import Prompt, prompt_text
from comlrl_lightning.utilities.calls import UserFunction, qualified_name, short


@runtime_checkable
class JointFormat(Protocol):
    """How one model is asked for all answers. Replace it by any object with these two methods.

    A dataclass comes back from a checkpoint by itself; other objects must be given again. YAML can name a class whose
    methods have the annotations that stand here.
    """

    def build_prompt(self, prompts: Sequence[Prompt]) -> Prompt:
        """One prompt, a text or chat messages, out of the `[N]` prompts of the agents."""
        ...

    def split_completion(self, text: str, num_agents: int) -> list[str] | None:
        """`[N]` answers out of a completion, ``""`` for an agent without one; None if there are none at all."""
        ...


Collaboration = Literal["decentralized", "centralized"] | JointFormat
"""Who writes the answers: each agent its own, or one model all of them, in `TaggedSections` or in a format given."""


@dataclass(frozen=True)
class TaggedSections(JointFormat, KnownKeywords):
    """One section per agent, between an opening and a closing tag.

    A section starts at the first opening tag of its agent and ends at the next tag, whichever it is, or where the
    completion ends. So sections may come in any order and may be left open; later sections of the same agent and text
    outside of sections are ignored. Upper and lower case are alike, and white space around an answer is cut off.

    The prompt is a text, or one chat message of the user if any agent's prompt is chat messages.

    Args:
        tag: Name of an agent's tag, with ``{i}`` for its index from 0.

    Raises:
        ValueError: If `tag` has no ``{i}`` or holds what a tag cannot.
    """

    tag: str = "agent_{i}"

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str) or not re.fullmatch(r"[\w.-]*\{i\}[\w.-]*", self.tag):
            raise ValueError(
                f"tag={self.tag!r} makes no tags. Write letters, digits and any of _ - . around one {{i}}, which stands"
                " for the index of the agent, as in 'agent_{i}'."
            )

    def build_prompt(self, prompts: Sequence[Prompt]) -> Prompt:
        """The agents' prompts one after the other, then what to write: no cut of a long prompt takes that away.

        Args:
            prompts: `[N]`.
        """
        names = [self.tag.replace("{i}", str(agent)) for agent in range(len(prompts))]
        asked = [f"Prompt of {name}:\n{_text(prompt)}" for name, prompt in zip(names, prompts, strict=True)]
        sections = [f"<{name}>\n(answer of {name})\n</{name}>" for name in names]
        text = "\n\n".join(
            [
                f"You write the answers of a team: {', '.join(names)}. Each has a prompt of its own.",
                *asked,
                "Answer every prompt in a section of its own. Put each answer between the opening and the closing tag"
                " that belong to it, and write nothing outside of the tags:\n" + "\n".join(sections),
            ]
        )
        if all(isinstance(prompt, str) for prompt in prompts):
            return text + "\n"  # a model without a chat template goes on in a new line
        return [{"role": "user", "content": text}]

    def split_completion(self, text: str, num_agents: int) -> list[str] | None:
        """The answers in the sections of a completion.

        Args:
            text: The completion.
            num_agents: N.

        Returns:
            `[N]` answers, ``""`` for those without a section; None if there is no section.
        """
        before, after = self.tag.split("{i}")
        numbers = "|".join(map(str, range(num_agents)))
        pattern = rf"<\s*(/?)\s*{re.escape(before)}({numbers}){re.escape(after)}\s*>"
        parts = re.split(pattern, text, flags=re.IGNORECASE)  # the text before, then slash, number and text of each tag
        answers: dict[int, str] = {}
        for slash, number, section in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            if not slash:
                answers.setdefault(int(number), section.strip())
        return [answers.get(agent, "") for agent in range(num_agents)] if answers else None


def joint_format_of(collaboration: Collaboration) -> JointFormat | None:
    """The format of a centralized team; None for agents that answer one by one.

    Args:
        collaboration: As an algorithm takes it.

    Raises:
        ValueError: If it is none of the two names and no format.
    """
    if collaboration == "decentralized":
        return None
    if collaboration == "centralized":
        return TaggedSections()
    if isinstance(collaboration, type):
        name = qualified_name(collaboration)
        raise ValueError(f"collaboration={name} is a class. Give an object of it, {collaboration.__name__}().")
    if not isinstance(collaboration, JointFormat):
        raise ValueError(
            f"collaboration={short(collaboration)} is unknown. Use 'decentralized', 'centralized', or an object with"
            " the methods build_prompt and split_completion, such as TaggedSections()."
        )
    UserFunction(collaboration.build_prompt, "collaboration", 1, (), "the prompts of the agents")
    UserFunction(collaboration.split_completion, "collaboration", 2, (), "a completion and the number of agents")
    return collaboration


def merged_prompt(joint_format: JointFormat, prompts: Sequence[Prompt]) -> Prompt:
    """What one model reads to answer for all agents.

    Args:
        joint_format: Builds it.
        prompts: `[N]` prompts of the agents; the format gets a copy.

    Raises:
        ValueError: If the format returns neither a text nor chat messages.
    """
    build = UserFunction(joint_format.build_prompt, "collaboration", 1, (), "the prompts of the agents")
    place = f"the prompts {short(prompts)}"
    return checked_prompt(build(place, deepcopy([*prompts])), build.label, place)


def split_or_empty(joint_format: JointFormat, text: str, num_agents: int) -> tuple[tuple[str, ...], bool]:
    """The agents' answers in a completion that holds them all.

    Args:
        joint_format: Splits it.
        text: The completion.
        num_agents: N.

    Returns:
        `[N]` answers, all ``""`` if there is no section, and whether there was one.

    Raises:
        ValueError: If the format returns anything but N texts or None.
    """
    split = UserFunction(joint_format.split_completion, "collaboration", 2, (), "a completion and the number of agents")
    place = f"the completion {short(text)}"
    answers = split(place, text, num_agents)
    if answers is None:
        return ("",) * num_agents, False
    fits = isinstance(answers, list | tuple) and len(answers) == num_agents
    if not fits or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(
            f"{split.label} returned {short(answers)} for {place}. Return a list of {num_agents} texts, one per agent,"
            " or None if the completion holds none of them."
        )
    return tuple(map(str, answers)), True


def _text(prompt: Prompt) -> str:
    """A prompt as a part of another one: a single message gives its content, several become lines with their roles."""
    return prompt[0]["content"] if not isinstance(prompt, str) and len(prompt) == 1 else prompt_text(prompt)
