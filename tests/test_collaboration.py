"""One model for all answers: what it is asked, and how its completion is taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonargparse
import pytest

from comlrl_lightning.environment.joint_format import (
    Collaboration,
    JointFormat,
    TaggedSections,
    joint_format_of,
    merged_prompt,
    split_or_empty,
)
from comlrl_lightning.types import Prompt
from comlrl_lightning.utilities.plain import from_plain, to_plain


@dataclass(frozen=True)
class Lines:
    """Prompts and answers are lines."""

    def build_prompt(self, prompts: Sequence[Prompt]) -> Prompt:
        return "\n".join(map(str, prompts))

    def split_completion(self, text: str, num_agents: int) -> list[str] | None:
        lines = text.splitlines()
        return lines if len(lines) == num_agents else None


class Returning:
    """A format whose methods return what they are told."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def build_prompt(self, prompts: Sequence[Prompt]) -> Any:
        return self.returned

    def split_completion(self, text: str, num_agents: int) -> Any:
        return self.returned


class TestSplit:
    @pytest.mark.parametrize(
        ("text", "answers"),
        [
            ("<agent_0>red</agent_0><agent_1>blue</agent_1>", ["red", "blue"]),
            ("<agent_0>\n red \n</agent_0>\n\n<agent_1>\tblue sky\n</agent_1>", ["red", "blue sky"]),
            ("<agent_1>blue</agent_1> <agent_0>red</agent_0>", ["red", "blue"]),
            # Left open: the last section, and one that the next tag ends.
            ("<agent_0>red</agent_0><agent_1>blue", ["red", "blue"]),
            ("<agent_0>red <agent_1>blue", ["red", "blue"]),
            ("<agent_0>red</agent_1><agent_1>blue</agent_0>", ["red", "blue"]),
            # The first section of an agent counts, even if it is empty.
            ("<agent_0>red</agent_0><agent_0>green</agent_0><agent_1>blue</agent_1>", ["red", "blue"]),
            ("<agent_0></agent_0><agent_0>green</agent_0><agent_1>blue", ["", "blue"]),
            ("<agent_0>red<agent_0>green</agent_0>", ["red", ""]),
            # Text outside of sections belongs to nobody.
            ("Sure! <agent_0>red</agent_0> and <agent_1>blue</agent_1> Done.", ["red", "blue"]),
            ("<AGENT_0>Red</Agent_0>< agent_1 >Blue< / agent_1 >", ["Red", "Blue"]),
            ("<agent_1>blue</agent_1>", ["", "blue"]),
            # No tags of these two agents, and tags of others, are text.
            ("<agent_0>a <b>red</b> <agent_2>rose</agent_0>", ["a <b>red</b> <agent_2>rose", ""]),
            ("<agent_0>", ["", ""]),
        ],
    )
    def test_two_agents(self, text: str, answers: list[str]) -> None:
        assert TaggedSections().split_completion(text, 2) == answers

    @pytest.mark.parametrize("text", ["", "red and blue", "agent_0: red", "red</agent_0>", "<agent_2>red</agent_2>"])
    def test_no_section(self, text: str) -> None:
        assert TaggedSections().split_completion(text, 2) is None
        assert split_or_empty(TaggedSections(), text, 2) == (("", ""), False)

    def test_a_section_without_text_is_found(self) -> None:
        assert split_or_empty(TaggedSections(), "<agent_1></agent_1>", 2) == (("", ""), True)

    def test_numbers_of_several_digits(self) -> None:
        # Twelve agents: agent_1 is no beginning of agent_11.
        text = "".join(f"<agent_{agent}>{agent}</agent_{agent}>" for agent in reversed(range(12)))
        assert TaggedSections().split_completion(text, 12) == [str(agent) for agent in range(12)]

    def test_a_tag_of_ones_own(self) -> None:
        text = "<xy0-part>no</xy0-part><x.0-part>red</x.0-part><X.1-PART>blue"
        assert TaggedSections("x.{i}-part").split_completion(text, 2) == ["red", "blue"]

    @pytest.mark.parametrize("tag", ["agent", "", "{i}{i}", "agent {i}", "<agent_{i}>", 3])
    def test_what_makes_no_tags_is_refused(self, tag: Any) -> None:
        with pytest.raises(ValueError, match=r"tag=.* makes no tags\. Write letters"):
            TaggedSections(tag)


class TestPrompt:
    def test_of_texts(self) -> None:
        prompt = TaggedSections("role_{i}").build_prompt(["Name a color.", "Name a fruit."])
        assert isinstance(prompt, str)
        parts = ["Prompt of role_0:\nName a color.", "Prompt of role_1:\nName a fruit.", "<role_0>", "</role_0>"]
        parts += ["<role_1>", "</role_1>"]
        positions = [prompt.index(part) for part in parts]
        assert positions == sorted(positions)
        assert prompt.endswith("</role_1>\n")  # what to write stands last, where no cut from the left takes it

    def test_an_answer_as_the_prompt_shows_it_comes_apart(self) -> None:
        prompt = TaggedSections().build_prompt(["p", "q"])
        shown = str(prompt)[str(prompt).index("<agent_0>") :]
        assert TaggedSections().split_completion(shown, 2) == ["(answer of agent_0)", "(answer of agent_1)"]

    def test_chat_messages_of_one_agent_make_chat_messages(self) -> None:
        system = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Name a fruit."}]
        single = [{"role": "user", "content": "Name a tree."}]
        prompt = TaggedSections().build_prompt(["Name a color.", system, single])
        assert isinstance(prompt, list)
        (message,) = prompt
        assert message["role"] == "user"
        for part in ("agent_0:\nName a color.\n", "agent_1:\nsystem: Be short.\nuser: Name a fruit.\n", "<agent_2>"):
            assert part in message["content"]
        assert "agent_2:\nName a tree.\n" in message["content"]


class TestCollaboration:
    def test_names(self) -> None:
        assert joint_format_of("decentralized") is None
        assert joint_format_of("centralized") == TaggedSections()

    def test_a_format_of_ones_own(self) -> None:
        lines = Lines()
        assert joint_format_of(lines) is lines
        assert merged_prompt(lines, ["p", "q"]) == "p\nq"
        assert split_or_empty(lines, "red\nblue", 2) == (("red", "blue"), True)
        assert split_or_empty(lines, "red", 2) == (("", ""), False)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("central", r"collaboration='central' is unknown\. Use 'decentralized', 'centralized', or an object"),
            (None, r"collaboration=None is unknown"),
            (TaggedSections, r"collaboration=.*TaggedSections is a class\. Give an object of it, TaggedSections\(\)"),
        ],
    )
    def test_anything_else_is_refused(self, given: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            joint_format_of(given)

    def test_signatures_are_read_at_construction(self) -> None:
        class Short(Lines):
            def split_completion(self, text: str) -> list[str] | None:  # type: ignore[override]
                return [text]

        with pytest.raises(ValueError, match=r"cannot be called with a completion and the number of agents"):
            joint_format_of(Short())  # type: ignore[arg-type]

    def test_a_checkpoint_holds_the_tags(self) -> None:
        assert from_plain("collaboration", to_plain(TaggedSections("x{i}"))) == TaggedSections("x{i}")

    @pytest.mark.parametrize(
        ("written", "expected"),
        [
            ("centralized", "centralized"),
            (
                {
                    "class_path": "comlrl_lightning.environment.joint_format.TaggedSections",
                    "init_args": {"tag": "x{i}"},
                },
                "x{i}",
            ),
            ({"class_path": f"{__name__}.Lines"}, Lines()),
        ],
    )
    def test_yaml_names_it(self, written: Any, expected: object) -> None:
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_function_arguments(_takes_collaboration)
        parsed = parser.instantiate(parser.parse_object({"collaboration": written})).collaboration
        assert (parsed.tag if isinstance(parsed, TaggedSections) else parsed) == expected
        assert joint_format_of(parsed) is not None


def _takes_collaboration(collaboration: Collaboration = "decentralized") -> None:
    """What an algorithm's constructor looks like to the command line."""


class TestWhatAFormatReturns:
    @pytest.mark.parametrize("returned", [3, ["red"], ["red", 4], "rb", ("red", None), ["red", "blue", "green"]])
    def test_other_answers_are_refused(self, returned: Any) -> None:
        with pytest.raises(
            ValueError, match=r"Returning\.split_completion returned .* for the completion 'x'.* 2 texts"
        ):
            split_or_empty(Returning(returned), "x", 2)

    @pytest.mark.parametrize("returned", [None, 3, [], [{"role": "user"}], ["p", "q"]])
    def test_other_prompts_are_refused(self, returned: Any) -> None:
        with pytest.raises(ValueError, match=r"build_prompt returned .* for the prompts .*Return a text or a list of"):
            merged_prompt(Returning(returned), ["p", "q"])

    def test_the_format_gets_a_copy(self) -> None:
        class Careless(Lines):
            def build_prompt(self, prompts: Sequence[Prompt]) -> Prompt:
                assert isinstance(prompts[0], list)
                prompts[0][0]["content"] = "changed"
                return "p"

        messages: list[Prompt] = [[{"role": "user", "content": "hello"}]]
        assert merged_prompt(Careless(), messages) == "p"
        assert messages == [[{"role": "user", "content": "hello"}]]

    def test_its_exceptions_name_it(self) -> None:
        class Broken(Lines):
            def split_completion(self, text: str, num_agents: int) -> list[str] | None:
                raise KeyError(text)

        with pytest.raises(KeyError) as caught:
            split_or_empty(Broken(), "red", 2)
        assert "split_completion for the completion 'red'" in caught.value.__notes__[0]

    def test_formats_are_known_by_their_methods(self) -> None:
        assert isinstance(Lines(), JointFormat)
        assert not isinstance("centralized", JointFormat)
