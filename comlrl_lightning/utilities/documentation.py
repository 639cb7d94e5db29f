"""Documentation of dataclasses whose fields have a docstring each: one text for `help`, IDEs and the command line."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TypeVar

C = TypeVar("C", bound=type)


class FieldDocumentation:
    """Class docstring with an ``Args:`` section, assembled from the docstrings of the fields when it is first read.

    Args:
        summary: The docstring as it stands in the class.
    """

    def __init__(self, summary: str) -> None:
        self._summary = summary

    def __get__(self, instance: object, owner: type) -> str:
        texts = field_texts(owner)
        names = [field.name for field in fields(owner) if field.init and field.name in texts]
        entries = (textwrap.indent(f"{name}: {' '.join(texts[name].split())}", "    ") for name in names)
        return "\n".join([inspect.cleandoc(self._summary), "", "Args:", *entries, ""])


def document_fields(cls: C) -> C:
    """Let the docstring of a dataclass list the texts of all its fields, inherited ones included."""
    cls.__doc__ = FieldDocumentation(cls.__dict__.get("__doc__") or "")  # type: ignore[assignment]
    return cls


def field_texts(cls: type) -> dict[str, str]:
    """Text of each field of a dataclass: the string that stands below it in the source, the most derived one first.

    A class without source, such as one typed into an interpreter, adds none.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            texts.update(_own_texts(base))
    return texts


def _own_texts(cls: type) -> Iterator[tuple[str, str]]:
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
