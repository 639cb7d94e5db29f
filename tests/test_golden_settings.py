"""No setting, default or entry of a checkpoint is lost; what is new is written down with them.

``python -m tests.golden.update settings checkpoint_keys`` writes both anew.
"""

from __future__ import annotations

import pytest

from tests.golden import files, snapshots


@pytest.mark.parametrize("algorithm", snapshots.ALGORITHMS)
def test_settings_of_algorithms(algorithm: str) -> None:
    golden = files.read("settings")["algorithms"][algorithm]
    assert list(files.differences(golden, snapshots.settings_of(algorithm))) == []


@pytest.mark.parametrize("algorithm", snapshots.ALGORITHMS)
def test_the_command_line_takes_what_checkpoints_hold(algorithm: str) -> None:
    golden = files.read("settings")["algorithms"][algorithm]
    assert golden["command_line"].keys() == golden["hparams"].keys()


def test_settings_of_other_classes() -> None:
    golden = files.read("settings")["classes"]
    seen = {name: snapshots.signature_of(value) for name, value in snapshots.public_classes().items()}
    assert list(files.differences(golden, seen)) == []


@pytest.mark.parametrize("algorithm", snapshots.ALGORITHMS)
def test_checkpoint_keys(algorithm: str) -> None:
    golden = files.read("checkpoint_keys")[algorithm]
    assert list(files.differences(golden, snapshots.checkpoint_keys_of(algorithm))) == []
