"""The structure of the package in numbers: size, import circles, arrows that run up, settings declared more than once.

    python -m benchmarks.house
    python -m benchmarks.house --details --static

The first prints a table, with the files that one training step crosses; ``--details`` adds what was counted, and
``--static`` leaves the training step out and reads nothing but source text.

A *room* is what stands directly in the package: a folder or a module. `FLOORS` says which rooms may know each other:
a room imports from the floors below its own alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._report import table
from benchmarks._source import (
    ROOT,
    Declaration,
    arrows_up,
    circles,
    declarations,
    imports,
    module_arrows,
    repeated,
    room_arrows,
    sources,
)

PACKAGE = "comlrl_lightning"
FOLDERS = {PACKAGE: ROOT / PACKAGE, f"{PACKAGE}.callbacks": ROOT / "callbacks"}
"""Where the modules of each package are; links to folders are not followed."""
FLOORS = (
    ("_version", "functional", "keywords", "types"),
    ("utilities",),
    ("assets", "files", "metrics", "reports"),
    ("tasks",),
    ("data", "loggers", "reward_model"),
    ("rewards",),
    ("agents", "environment"),
    ("critics",),
    ("rollouts", "strategies"),
    ("preferences",),
    ("learning",),
    ("algorithms", "callbacks"),
    ("evaluation",),
    ("__init__",),
    ("cli", "demo"),
    ("__main__",),
)
"""Rooms from the ground floor up."""


@dataclass(frozen=True)
class House:
    """What source text alone says."""

    num_lines: int
    num_modules: int
    rooms: list[str]
    module_circles: list[list[str]]
    room_circles: list[list[str]]
    num_arrows: int
    up: list[tuple[str, str]]
    repeated: dict[str, list[Declaration]]

    @classmethod
    def of(cls, folders: Mapping[str, Path], floors: Sequence[Sequence[str]]) -> House:
        """Look at some packages.

        Args:
            folders: Folder of each package.
            floors: Rooms from the ground floor up.
        """
        modules = sources(folders)
        found = list(imports(modules))
        rooms = room_arrows(found, modules)
        return cls(
            num_lines=sum(source.num_lines for source in modules.values()),
            num_modules=len(modules),
            rooms=sorted({source.room for source in modules.values()}),
            module_circles=circles(module_arrows(found)),
            room_circles=circles(rooms),
            num_arrows=sum(map(len, rooms.values())),
            up=arrows_up(rooms, floors),
            repeated=repeated(declarations(modules), modules),
        )

    @property
    def several_defaults(self) -> list[str]:
        """Those of the repeated settings that have a default in more than one place."""
        return [name for name, places in self.repeated.items() if sum(one.has_default for one in places) > 1]

    def rows(self) -> list[tuple[str, str, list[str]]]:
        """What was counted, how much, and the details."""
        return [
            ("lines of the library", f"{self.num_lines:,}", [f"{self.num_modules} modules"]),
            ("rooms", str(len(self.rooms)), [", ".join(self.rooms)]),
            ("circles of modules", str(len(self.module_circles)), [" <-> ".join(one) for one in self.module_circles]),
            ("circles of rooms", str(len(self.room_circles)), [" <-> ".join(one) for one in self.room_circles]),
            ("arrows between rooms", str(self.num_arrows), []),
            ("arrows that run up", str(len(self.up)), [f"{here} -> {there}" for here, there in self.up]),
            (
                "settings with several defaults",
                str(len(self.several_defaults)),
                [", ".join(self.several_defaults)],
            ),
            (
                "settings declared more than once",
                str(len(self.repeated)),
                [
                    f"{name}: {', '.join(f'{one.owner} ({one.place})' for one in places)}"
                    for name, places in self.repeated.items()
                ],
            ),
        ]


def crossing_rows() -> list[tuple[str, str, list[str]]]:
    """The same of a training step."""
    from benchmarks._crossing import crossed_by_a_step  # slow to import

    crossing = crossed_by_a_step([*FOLDERS.values()])
    files = [f"{path}: {calls} calls" for path, calls in sorted(crossing.files.items())]
    moves = [f"{origin} -> {target}: {calls} calls" for (origin, target), calls in sorted(crossing.moves.items())]
    return [
        ("files that a training step crosses", str(len(crossing.files)), files),
        ("pairs of files with a call between them", str(len(crossing.moves)), moves),
    ]


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--details", action="store_true", help="show what was counted")
    parser.add_argument("--static", action="store_true", help="leave the training step out")
    given = parser.parse_args(arguments)
    rows = House.of(FOLDERS, FLOORS).rows()
    if not given.static:
        rows = [*crossing_rows(), *rows]
    show(table(("what", "count"), [(what, count) for what, count, _ in rows]))
    if given.details:
        for what, count, details in rows:
            show(f"\n{what}: {count}")
            for detail in details:
                show(f"  {detail}")


if __name__ == "__main__":
    main()
