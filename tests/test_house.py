"""The structure of the package does not get worse, and what counts it counts right."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks import _source, house
from benchmarks._crossing import Crossing
from benchmarks.house import FLOORS, FOLDERS, House


@pytest.fixture(scope="module")
def package() -> House:
    return House.of(FOLDERS, FLOORS)


def test_no_circles(package: House) -> None:
    assert package.module_circles == []
    assert package.room_circles == []


def test_no_arrow_runs_up(package: House) -> None:
    assert package.up == []


def test_every_setting_is_declared_once(package: House) -> None:
    assert package.repeated == {}
    assert package.several_defaults == []


def test_every_room_has_a_floor_and_every_floor_its_rooms(package: House) -> None:
    assert sorted(room for floor in FLOORS for room in floor) == package.rooms


def test_the_library_is_counted_once(package: House) -> None:
    paths = [*(FOLDERS["comlrl_lightning"]).rglob("*.py"), *(FOLDERS["comlrl_lightning.callbacks"]).glob("*.py")]
    lines = {path.resolve(): path.read_text().count("\n") for path in paths}
    assert package.num_lines == sum(lines.values())
    assert package.num_modules == len(lines)


def test_the_table(package: House) -> None:
    shown: list[str] = []
    house.main(["--static", "--details"], shown.append)
    assert f"| lines of the library | {package.num_lines:,} |" in shown[0]
    assert f"\narrows that run up: {len(package.up)}" in shown


FILES = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.high.b import B as B\n",
    "low.py": "def later():\n    from pack import high\n    return high\n",
    "high/__init__.py": "",
    "high/a.py": "import os\nimport pack.high.b\nfrom pack.low import later\n",
    "high/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.high.a import later\n",
    "top.py": """
from dataclasses import dataclass
from typing import ClassVar

class CooperativeModule:
    def __init__(self, agents, depth=1, *, width=2, seed=0):
        pass

class Leaf(CooperativeModule):
    def __init__(self, *args, depth=3, **kwargs):
        pass

@dataclass(frozen=True)
class Group:
    width: int
    agents: int = 1
    kind: ClassVar[int] = 0
    other: int = 0

class Reader:
    def __init__(self, seed=1):
        pass
""",
}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A package of three rooms."""
    for name, text in FILES.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    (tmp_path / "pack" / "link").symlink_to(tmp_path / "pack" / "high")
    return {"pack": tmp_path / "pack"}


def test_a_small_package(folders: dict[str, Path]) -> None:
    # Type checks and functions count: a <-> b, and low -> high -> low between rooms.
    small = House.of(folders, [["low"], ["high", "top"], ["__init__"]])
    assert (small.num_modules, small.num_lines) == (6, sum(text.count("\n") for text in FILES.values()))
    assert small.rooms == ["__init__", "high", "low", "top"]
    assert small.module_circles == [["pack.high.a", "pack.high.b"]]
    assert small.room_circles == [["high", "low"]]
    assert (small.num_arrows, small.up) == (3, [("low", "high")])
    # agents has no default in the algorithm, and Reader is neither an algorithm nor a dataclass.
    assert {name: [one.owner for one in places] for name, places in small.repeated.items()} == {
        "depth": ["CooperativeModule", "Leaf"],
        "width": ["CooperativeModule", "Group"],
    }
    assert small.several_defaults == ["depth"]


def test_a_room_without_a_floor_is_named(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"\['high'\] stand on no floor"):
        House.of(folders, [["low"], ["top"], ["__init__"]])


def test_rooms_of_one_floor_do_not_know_each_other() -> None:
    assert _source.arrows_up({"a": {"b"}, "b": {"c"}}, [["c"], ["a", "b"]]) == [("a", "b")]


def test_calls_into_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "crossed_pack"
    folder.mkdir()
    (folder / "outer.py").write_text(
        "from crossed_pack import inner\ndef call(n):\n    return list(map(inner.f, range(n)))\n"
    )
    (folder / "inner.py").write_text("def f(x):\n    return g(x)\ndef g(x):\n    return x\n")
    (folder / "idle.py").write_text("def f():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    outer, crossing = importlib.import_module("crossed_pack.outer"), Crossing([folder])
    crossing.start()
    outer.call(3)
    crossing.stop()
    outer.call(1)
    # f and g, three times each; g is called from its own file.
    assert dict(crossing.files) == {"outer.py": 1, "inner.py": 6}
    assert dict(crossing.moves) == {("outer.py", "inner.py"): 3}
