"""The modules of a package as text, their imports, and the settings that their classes declare."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALGORITHM = "CooperativeModule"
"""Base class of the modules whose settings users write."""


@dataclass(frozen=True)
class Source:
    """A module of the package as text."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """Its code."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Its code, parsed."""
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """The folder or module directly in the package that it belongs to."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def num_lines(self) -> int:
        """Lines, empty ones and comments included."""
        return self.text.count("\n")


def sources(folders: Mapping[str, Path]) -> dict[str, Source]:
    """The modules of some packages by name.

    Args:
        folders: Folder of each package.
    """
    found = {}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            within = path.relative_to(folder)
            if any((folder / parent).is_symlink() for parent in within.parents if parent.name):
                continue
            parts = [package, *within.with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Source(name, path)
    return found


def shown(path: Path) -> str:
    """A path as one reads it: from the root of the repository."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


@dataclass(frozen=True, order=True)
class Import:
    """A module that imports another one, at the top, in a function or for type checks alone."""

    importer: str
    imported: str
    line: int


def imports(modules: Mapping[str, Source]) -> Iterator[Import]:
    """All imports between the modules; that of a package by the import of its part does not count."""
    for name, source in modules.items():
        for node in ast.walk(source.tree):
            for imported in _imported(node, modules):
                if imported != name:
                    yield Import(name, imported, node.lineno)  # type: ignore[attr-defined]


def _imported(node: ast.AST, modules: Mapping[str, Source]) -> list[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        parts = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [part if part in modules else node.module for part in parts]
    return [name for name in dict.fromkeys(names) if name in modules]


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of names that reach each other.

    Args:
        arrows: What each name leads to.
    """
    reached = {name: _reached(name, arrows) for name in arrows}
    groups = {
        tuple(sorted(other for other in reach if name in reached.get(other, ())))
        for name, reach in reached.items()
        if name in reach
    }
    return sorted(map(list, groups))


def _reached(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = [*arrows.get(start, ())]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += arrows.get(name, ())
    return reached


def module_arrows(found: Sequence[Import]) -> dict[str, set[str]]:
    """Which modules each module imports."""
    arrows = defaultdict(set)
    for one in found:
        arrows[one.importer].add(one.imported)
    return dict(arrows)


def room_arrows(found: Sequence[Import], modules: Mapping[str, Source]) -> dict[str, set[str]]:
    """Which other rooms each room imports from."""
    arrows = defaultdict(set)
    for one in found:
        here, there = modules[one.importer].room, modules[one.imported].room
        if here != there:
            arrows[here].add(there)
    return dict(arrows)


def arrows_up(arrows: Mapping[str, set[str]], floors: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Pairs of rooms of which the first imports from the second, which is not on a floor below.

    Args:
        arrows: Of the rooms.
        floors: Rooms from the ground floor up.

    Raises:
        ValueError: If a room has no floor.
    """
    level = {room: number for number, floor in enumerate(floors) for room in floor}
    if unplaced := sorted({*arrows, *(room for targets in arrows.values() for room in targets)} - level.keys()):
        raise ValueError(f"{unplaced} stand on no floor. Write them into FLOORS.")
    return sorted((here, there) for here, targets in arrows.items() for there in targets if level[there] >= level[here])


@dataclass(frozen=True, order=True)
class Declaration:
    """A setting as a class declares it: a field of a dataclass, or an argument of a constructor."""

    setting: str
    owner: str
    place: str
    has_default: bool


def declarations(modules: Mapping[str, Source]) -> list[Declaration]:
    """The settings that the algorithms and the dataclasses of the package declare."""
    classes = _classes(modules)
    algorithms = _descendants([node for _, node in classes], ALGORITHM)
    found = []
    for source, node in classes:
        is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for name, line, has_default in [
            *(_fields(node) if is_dataclass else ()),
            *(_arguments(node) if node.name in algorithms or is_dataclass else ()),
        ]:
            found.append(Declaration(name, node.name, f"{shown(source.path)}:{line}", has_default))
    return sorted(found)


def repeated(declared: Sequence[Declaration], modules: Mapping[str, Source]) -> dict[str, list[Declaration]]:
    """Settings of algorithms with a default that are declared in more than one place, by name.

    Args:
        declared: All declarations.
        modules: The modules that they stand in.
    """
    algorithms = _descendants([node for _, node in _classes(modules)], ALGORITHM)
    names = {one.setting for one in declared if one.owner in algorithms and one.has_default}
    by_name = defaultdict(list)
    for one in declared:
        if one.setting in names:
            by_name[one.setting].append(one)
    return {name: places for name, places in sorted(by_name.items()) if len(places) > 1}


def _classes(modules: Mapping[str, Source]) -> list[tuple[Source, ast.ClassDef]]:
    return [
        (source, node)
        for source in modules.values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]


def _descendants(classes: Sequence[ast.ClassDef], base: str) -> set[str]:
    """A class and all that derive from it, by name."""
    found = {base}
    while new := {node.name for node in classes if {ast.unparse(one) for one in node.bases} & found} - found:
        found |= new
    return found


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, int, bool]]:
    for statement in node.body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and not ast.unparse(statement.annotation).startswith(("ClassVar", "KW_ONLY"))
        ):
            yield statement.target.id, statement.lineno, statement.value is not None


def _arguments(node: ast.ClassDef) -> Iterator[tuple[str, int, bool]]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = statement.args
            several = [*arguments.posonlyargs, *arguments.args][1:]
            missing = len(several) - len(arguments.defaults)
            yield from ((one.arg, one.lineno, index >= missing) for index, one in enumerate(several))
            defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            yield from ((one.arg, one.lineno, default is not None) for one, default in defaults)
