"""What reaches the loggers, when, and at which env_step."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from comlrl_lightning import wandb_logger
from comlrl_lightning.algorithms import MAGRPO
from comlrl_lightning.callbacks import EvalInterval, EvalMetrics, RolloutMetrics
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.tasks import length_ratio
from tests.algorithms.support import ITEMS, MemoryLogger, echo, make_module, make_trainer


def by_turn(first: list[str], second: list[str], turn: int, batch_items: list[dict[str, Any]]) -> list[float]:
    """10 times the item's number plus the turn, the second completion one more."""
    reward = 10.0 * ITEMS.index(batch_items[0]) + turn
    return [reward, reward + 1.0]


def training_rows(logger: MemoryLogger) -> list[tuple[int | None, dict[str, float]]]:
    return [row for row in logger.rows if "turn_1/reward_mean" in row[1]]


class TestTable:
    def test_one_line_describes_it(self) -> None:
        assert repr(MetricTable(["a", "b"])) == "MetricTable(2 keys)"

    def test_it_averages_by_weight_and_forgets(self) -> None:
        table = MetricTable(["a", "b"], prefix="eval/")
        table.update("a", 2.0)
        table.update("a", 5.0, 2.0)
        # (2 + 2 * 5) / 3; nothing came for b.
        assert table.pop() == {"eval/a": 4.0}
        assert table.pop() == {}

    def test_it_goes_on_from_its_state(self) -> None:
        table, again = MetricTable(["a"]), MetricTable(["a"])
        table.update("a", torch.tensor([1.0, 2.0]))
        again.load_state_dict(table.state_dict())
        again.update("a", 6.0)
        # (1 + 2 + 6) / 3
        assert again.pop() == {"a": 3.0}

    def test_a_mean_is_not_rounded_to_the_modules_precision(self) -> None:
        table = MetricTable(["a"]).to(torch.bfloat16)
        table.update("a", 1.001)
        assert table.pop()["a"] == pytest.approx(1.001, abs=1e-7)

    def test_it_follows_the_module_to_no_device(self) -> None:
        # Not every device has float64; this one has no numbers at all.
        with torch.device("meta"):
            table = MetricTable(["a"])
        table.to("meta")
        table.update("a", 1.5)
        assert table.pop() == {"a": 1.5}
        assert {value.device.type for value in table.state_dict().values()} == {"cpu"}

    def test_nan_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="nan"):
            MetricTable(["a"]).update("a", float("nan"))


class TestGate:
    @pytest.mark.parametrize(
        ("logging_steps", "expected"),
        [
            # One item, two turns, K=2: 2 + 4 = 6 joint completions. Turn 1 gives 1, 2 and turn 2 gives 2, 3, plus 10 n.
            (1, [(6, 1.5, 2.5), (12, 11.5, 12.5), (18, 21.5, 22.5), (24, 31.5, 32.5)]),
            # Logs at 12 and 24, each the mean over two items.
            (7, [(12, 6.5, 7.5), (24, 26.5, 27.5)]),
            # 18 is the first of at least 13; the end of the fit logs the last item.
            (13, [(18, 11.5, 12.5), (24, 31.5, 32.5)]),
            (1000, [(24, 16.5, 17.5)]),
        ],
    )
    def test_a_log_is_the_mean_since_the_last(
        self, logging_steps: int, expected: list[tuple[int, float, float]]
    ) -> None:
        logger = MemoryLogger()
        module = make_module(
            MAGRPO, reward_func=by_turn, num_turns=2, external_transition=echo, logging_steps=logging_steps
        )
        make_trainer(logger=logger).fit(module, TaskDataModule(ITEMS))
        rows = [(step, row["turn_1/reward_mean"], row["turn_2/reward_mean"]) for step, row in training_rows(logger)]
        assert rows == expected
        assert all(row["env_step"] == step for step, row in logger.rows)

    def test_env_step_never_goes_back(self, tmp_path: Path) -> None:
        loggers = [MemoryLogger(), MemoryLogger()]
        data = TaskDataModule(ITEMS, ITEMS[:2])
        callbacks: list[Callback] = [
            EvalInterval(1),
            EvalMetrics(length_ratio.eval_logger, length_ratio.eval_aggregator),
            RolloutMetrics(length_ratio.metrics_callback),
        ]
        trainer = make_trainer(callbacks, logger=loggers[0], max_epochs=2)
        trainer.fit(module := make_module(MAGRPO), data)
        trainer.validate(module, data, verbose=False)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        again = make_trainer([EvalInterval(1)], logger=loggers[1], max_epochs=3)
        again.fit(make_module(MAGRPO), data, ckpt_path=str(tmp_path / "end.ckpt"))
        steps = [step for logger in loggers for step, _ in logger.rows]
        assert steps == sorted(steps, key=lambda step: step or 0)
        # Four items of two joint completions an epoch, three epochs.
        assert steps[-1] == 24


def test_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    data = TaskDataModule(ITEMS[:2], ITEMS[:1])
    make_trainer([EvalInterval(1)], logger=logger).fit(make_module(MAGRPO), data)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [event.step for event in events.Scalars("turn_1/reward_mean")] == [2, 4]
    assert [event.step for event in events.Scalars("eval/turn_1/reward_mean")] == [0, 2]


@pytest.mark.parametrize("monitor", [LearningRateMonitor(), DeviceStatsMonitor(cpu_stats=True)], ids=["rate", "device"])
def test_wandb_puts_everything_at_env_step(monitor: Callback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = wandb_logger({"project": "test", "name": "run", "dir": str(tmp_path)}, offline=True)
    assert logger
    trainer = make_trainer([EvalInterval(1), monitor], logger=logger, log_every_n_steps=1)
    trainer.fit(make_module(MAGRPO), TaskDataModule(ITEMS[:3], ITEMS[:1]))
    logger.experiment.finish()
    wandb.teardown()  # the file is written by a process of wandb's own, whose end this waits for
    (file,) = tmp_path.rglob("*.wandb")
    rows = wandb_rows(file)
    # Two joint completions an item: each evaluation stands where the item before ended.
    assert [row["env_step"] for row in rows if "turn_1/reward_mean" in row] == [2, 4, 6]
    assert [row["env_step"] for row in rows if "eval/turn_1/reward_mean" in row] == [0, 2, 4]
    steps = [row["env_step"] for row in rows]
    assert steps == sorted(steps)
    others = [row["env_step"] for row in rows if not any("reward_mean" in key for key in row)]
    assert set(others) >= {0, 2, 4}


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """The history of an offline run: records after a header of 7 bytes, in parts that no block of 32 KiB cuts."""
    content, position, record, rows = file.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if (left := 2**15 - position % 2**15) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record or the last part of one
            history = wandb_internal_pb2.Record.FromString(record).history.item
            rows += [{"/".join([*item.nested_key] or [item.key]): json.loads(item.value_json) for item in history}]
            record = b""
    return [row for row in rows if row]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = wandb_logger({"project": "test", "name": "run", "dir": str(tmp_path)})
    assert logger
    rows: list[dict[str, Any]] = []
    log = type(logger.experiment).log

    def recorded(run: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows.append(dict(data))
        return log(run, data, *args, **kwargs)

    monkeypatch.setattr(type(logger.experiment), "log", recorded)
    make_trainer([EvalInterval(1)], logger=logger).fit(make_module(MAGRPO), TaskDataModule(ITEMS[:2], ITEMS[:1]))
    logger.experiment.finish()
    steps = [row["env_step"] for row in rows if "env_step" in row]
    assert steps == sorted(steps)
    assert {step for row in rows if "turn_1/reward_mean" in row for step in [row["env_step"]]} == {2, 4}
    assert any(name.endswith(".wandb") for _, _, files in os.walk(tmp_path) for name in files)
