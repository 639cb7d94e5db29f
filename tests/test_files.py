"""Places, claims on them, and folders that list their files."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from comlrl_lightning.files import CONTENTS, Place, claim, contents, whole_folder


class Owner:
    """Somebody whose files are saved."""


def save(folder: str | Path, owner: object, *names: str) -> None:
    with whole_folder(folder, owner) as part:
        for name in names:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_text(name)


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("root", ["memory://places", "local"])
def test_what_a_place_does_is_the_same_everywhere(tmp_path: Path, root: str) -> None:
    folder = Place.of(str(tmp_path) if root == "local" else f"{root}/{tmp_path.name}")
    place = folder / "run" / "history.jsonl"
    assert not place.exists()
    for line in ("été\n", "second\n"):
        place.append_text(line)
    (folder / "run" / "other.json").write_text("{}")
    assert place.read_text() == "été\nsecond\n"
    assert (place.name, place.parent.name, str(place.with_suffix(".json"))) == (
        "history.jsonl",
        "run",
        str(folder / "run" / "history.json"),
    )
    assert [found.name for found in (folder / "run").glob("*.json*")] == ["history.jsonl", "other.json"]
    assert (folder / "run").is_folder()
    place.remove()
    place.remove()
    assert not place.exists()
    (folder / "run").remove()
    assert not (folder / "run" / "other.json").exists()


def test_an_address_that_lost_a_slash_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'s3:/bucket/run' is an address that lost a slash. Pass it as a text"):
        Place.of(Path("s3://bucket/run"))
    assert Place.of("file:///tmp/x") == Place("/tmp/x")


def test_a_full_disk_leaves_no_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(str(tmp_path / "history.jsonl"))
    place.append_text("first\n")
    write = io.FileIO.write

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            if len(content) < 4:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, content[:3])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode, buffering: Full(path, "ab"))
        with pytest.raises(OSError, match="No space left"):
            place.append_text("second\n")
    assert (tmp_path / "history.jsonl").read_bytes() == b"first\n"


def test_two_writers_at_the_same_time_do_not_take_each_others_parts(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "metrics.json"))

    def write(part: Path) -> None:
        part.write_text("outer")
        place.write_text("inner")

    place.write_whole(write)
    assert (tmp_path / "metrics.json").read_text() == "outer"
    assert files_in(tmp_path) == ["metrics.json"]


def test_what_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "metrics.json"))
    code = (
        "import sys; from comlrl_lightning.files import Place, claim; "
        "taken = claim(Place(sys.argv[1]), 'Other'); print(taken[0].name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "metrics.json\n"
        with pytest.warns(UserWarning, match=r"Mine: another run is writing .*metrics.json right now"):
            mine, lock = claim(place, "Mine")
        assert mine.name == "metrics-2.json"
        assert lock is not None
        other.stdin.close()
    again, _lock = claim(place, "Mine")
    assert again == place


def test_the_same_process_may_claim_again(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "agents"))
    first, second = claim(place, "First"), claim(place, "Second")
    assert first[0] == second[0] == place


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_folder_holds_what_belongs_to_it(tmp_path: Path, where: str) -> None:
    folder = str(tmp_path / "agents") if where == "local" else f"memory://folders/{tmp_path.name}"
    save(folder, Owner(), "agent_0/adapter.json", "agent_1/adapter.json", "critic/adapter.json", "critic/sub/head")
    (Place(folder) / "agent_0" / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match="holds agent_0, agent_1, critic of an earlier save, which this one replaces"):
        save(folder, Owner(), "agent_0/model")
    assert contents(Place(folder)) == ["agent_0/model"]
    assert (Place(folder) / "agent_0" / "notes.txt").read_text() == "mine"
    assert not (Place(folder) / "critic").exists()
    assert not (Place(folder) / "agent_0" / "adapter.json").exists()


def test_what_nobody_lists_stays_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "critic").mkdir()
    (tmp_path / "own").mkdir()
    with pytest.warns(UserWarning, match=r"holds critic, which does not belong to what is saved there now and stays"):
        save(tmp_path, Owner(), "agent_0/model")
    assert (tmp_path / "critic").is_dir()


def test_the_same_owner_saves_again_in_silence(tmp_path: Path) -> None:
    owner = Owner()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            save(tmp_path, owner, "agent_0/model")
    assert files_in(tmp_path) == ["agent_0/model", CONTENTS]


def test_an_error_while_saving_leaves_the_former_files(tmp_path: Path) -> None:
    owner = Owner()
    save(tmp_path, owner, "agent_0/model")

    def break_off() -> None:
        with whole_folder(tmp_path, owner) as part:
            (part / "half").write_text("")
            raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        break_off()
    assert files_in(tmp_path) == ["agent_0/model", CONTENTS]


def test_a_kill_between_files_leaves_all_of_them_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    save(tmp_path, owner, "critic/head", "agent_0/model")
    write = Place.write_whole

    def killed(place: Place, fill: Any) -> None:
        if place.name == "second":
            raise KeyboardInterrupt
        write(place, fill)

    with monkeypatch.context() as patch:
        patch.setattr(Place, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, owner, "agent_0/first", "agent_0/second")
    assert contents(Place(str(tmp_path))) == ["agent_0/first", "agent_0/model", "agent_0/second", "critic/head"]
    save(tmp_path, owner, "agent_0/second")
    assert files_in(tmp_path) == ["agent_0/second", CONTENTS]


@pytest.mark.parametrize("listed", ['{"files": ["../outside", "/outside"]}', "[1", '{"names": []}'])
def test_a_list_of_another_kind_removes_nothing(tmp_path: Path, listed: str) -> None:
    (tmp_path / "outside").write_text("")
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / CONTENTS).write_text(listed)
    if listed.startswith('{"files'):
        save(folder, Owner(), "agent_0/model")
        assert json.loads((folder / CONTENTS).read_text()) == {"files": ["agent_0/model"]}
    else:
        with pytest.raises(ValueError, match=r"is no list of files that save_agents wrote. Use another folder."):
            save(folder, Owner(), "agent_0/model")
    assert (tmp_path / "outside").exists()
