"""Disks that are full, or not to be written on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.registry import Fault, Refused, faults
from tests.faults.runs import FileOpener, every_step, is_loadable, new_module, train, weights_in

FULL = OSError(errno.ENOSPC, "No space left on device")
AREA = "disks"


@faults(
    Fault(
        AREA,
        "the disk gets full while a checkpoint is written",
        "`OSError`: No space left on device; the former checkpoint is whole, and the run goes on from it exactly",
    )
)
def test_full_while_saving(fault: Fault, tmp_path: Path) -> None:
    train([every_step(tmp_path / "whole")])
    write, count = FileOpener.write, 0

    def patched(self: Any, content: bytes) -> int:
        nonlocal count
        count += 1
        if count == 6:
            write(self, content[: len(content) // 2])
            raise FULL
        return int(write(self, content))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileOpener, "write", patched)
        with pytest.raises(OSError, match="No space left on device"):
            train([every_step(tmp_path / "broken")])
    assert [path.name for path in (tmp_path / "broken").glob("*.ckpt")] == ["batch-000005.ckpt"]
    assert is_loadable(tmp_path / "broken" / "batch-000005.ckpt")
    train([every_step(tmp_path / "broken")], ckpt_path=tmp_path / "broken" / "batch-000005.ckpt")
    ended, whole = (weights_in(tmp_path / name / "batch-000012.ckpt") for name in ("broken", "whole"))
    torch.testing.assert_close(ended, whole, rtol=0, atol=0)


def a_file_in_the_way(folder: Path) -> None:
    """Checkpoints into a folder that is a file."""
    (folder / "saved").write_text("not a folder")
    train([every_step(folder / "saved")])


def agents_into_a_file(folder: Path) -> None:
    (folder / "agents").write_text("not a folder")
    new_module().save_agents(folder / "agents")


@faults(
    Refused(AREA, "checkpoints into a folder that is a file", "File exists", a_file_in_the_way, FileExistsError),
    Refused(AREA, "trained agents into a folder that is a file", "should be a directory", agents_into_a_file),
)
def test_in_the_way(fault: Refused, tmp_path: Path) -> None:
    fault.check(tmp_path)
