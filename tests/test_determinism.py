"""Every algorithm gives the numbers that it once gave: tokens, rewards, logs, weights, on whichever CPU.

The numbers stand in ``tests/golden``. A change that is meant to change them writes them anew with
``python -m tests.golden.update NAME``, and the difference of the files shows what it has changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_lightning import IAC, MADPO, MAGRPO
from tests.golden import files
from tests.golden.runs import CASES, CHECKPOINTS, Case, checkpoint_of, run
from tests.golden.update import MARGIN, measured_margins

KEPT = {name: case for name, case in CASES.items() if case.stop is not None}
"""Runs with a checkpoint from an older version of the package."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:early_termination_threshold=1.5 stopped a joint"),
    pytest.mark.filterwarnings("ignore:sampling with top_p=1.0, top_k=12"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]


def differences(case: Case, golden: Any, seen: Any) -> list[str]:
    """Where two records differ; rewards of a model are no exact numbers."""
    return [
        line
        for part in seen
        for line in files.differences(golden[part], seen[part], part, exact=part in files.EXACT and not case.learned)
    ]


@pytest.mark.parametrize("name", CASES)
def test_golden_numbers(name: str) -> None:
    golden = files.read(name)
    seen, _ = run(CASES[name], golden["seed"])
    assert differences(CASES[name], golden, seen) == []


@pytest.mark.parametrize("name", KEPT)
def test_old_checkpoints_go_on(name: str) -> None:
    case, golden = KEPT[name], files.read(name)
    assert case.stop is not None
    seen, _ = run(case, golden["seed"], ckpt_path=checkpoint_of(name))
    assert len(seen["steps"]) == len(golden["steps"]) - case.stop
    assert 0 < len(seen["logs"]) < len(golden["logs"])
    seen["weights"] = {group: {"end": sums["end"]} for group, sums in seen["weights"].items()}
    rest = {
        "steps": golden["steps"][case.stop :],
        "logs": golden["logs"][-len(seen["logs"]) :],
        "weights": {group: {"end": sums["end"]} for group, sums in golden["weights"].items()},
    }
    assert not seen.pop("evaluations")
    del seen["seed"]
    assert differences(case, rest, seen) == []


@pytest.mark.parametrize("name", KEPT)
def test_old_checkpoints_load(name: str) -> None:
    case = KEPT[name]
    loaded = case.algorithm.load_from_checkpoint(checkpoint_of(name), agents=case.agents(), seed=5)
    state = torch.load(checkpoint_of(name), weights_only=True)["state_dict"]
    trained = {key: value for key, value in loaded.named_parameters() if value.requires_grad}
    assert trained
    assert all(torch.equal(value, state[key]) for key, value in trained.items())


def test_checkpoints_are_small_and_of_several_algorithms() -> None:
    assert {case.algorithm for case in KEPT.values()} == {MAGRPO, IAC, MADPO}
    paths = sorted(CHECKPOINTS.glob("*.ckpt"))
    assert [path.stem for path in paths] == sorted(KEPT)
    assert all(path.stat().st_size < 200_000 for path in paths)


def test_no_draw_lies_close_to_the_border_between_two_tokens() -> None:
    golden = {name: files.read(name) for name in CASES}
    assert min(record["smallest_margin"] for record in golden.values()) >= MARGIN
    with measured_margins() as margins:
        run(CASES["mareinforce"], golden["mareinforce"]["seed"])
    assert min(margins) == pytest.approx(golden["mareinforce"]["smallest_margin"], rel=1e-4)


def test_every_file_is_of_a_run() -> None:
    snapshots = {"settings", "checkpoint_keys"}
    assert {path.stem for path in Path(files.FOLDER).glob("*.json")} == {*CASES, *snapshots}


def test_a_difference_is_found() -> None:
    golden = {"a": [1.0, {"b": "x"}], "gone": 1}
    assert list(files.differences(golden, golden)) == []
    seen = {"a": [1.0 + 1e-4, {"b": "y"}, 3], "new": 2}
    assert sorted(files.differences(golden, seen)) == [
        "/a: 3 entries, were 2",
        "/a[0]: 1.0001, was 1.0",
        "/a[1]/b: 'y', was 'x'",
        "/gone: is gone, was 1",
        "/new: is new, 2",
    ]
    assert list(files.differences(1.0, 1.0 + 1e-7)) == []
    assert list(files.differences(1.0, 1.0 + 1e-7, exact=True)) == [": 1.0000001, was 1.0"]
