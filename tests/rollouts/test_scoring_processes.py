"""Rewards by processes of their own, which may crash, and programs that end with workers around."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from comlrl_lightning.environment.reward import RewardFunction
from comlrl_lightning.environment.reward_workers import RewardWorkers
from tests.rollouts.reward_functions import (
    Counter,
    OddError,
    PickyState,
    as_told,
    lengths,
    modes,
)
from tests.rollouts.scoring import calls_of, in_child, is_told_to_hang, limit_only, score, told
from tests.rollouts.telling import appears
from tests.waiting import PATIENCE_SECONDS, eventually


class TestProcesses:
    def test_a_crash_names_the_item_and_the_next_turn_goes_on(self) -> None:
        workers, reward = RewardWorkers(2, "process"), RewardFunction(as_told, 1)
        with pytest.raises(
            RuntimeError,
            match=r"The worker process of reward_func=\S+as_told ended with exit code 3 for task item 11 .*turn 3. Let",
        ):
            workers.score(reward, told("score", "exit"))
        with pytest.raises(RuntimeError, match=r"was killed by SIGKILL for task item 10 "):
            workers.score(reward, told("die"))
        assert workers.score(reward, told("score", "score", "score")).rows == [[[0.0]], [[1.0]], [[2.0]]]

    def test_a_hanging_one_is_killed_with_all_that_it_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limit_only(monkeypatch, is_told_to_hang)
        workers, reward = RewardWorkers(1, "process", 0.5, -1.0), RewardFunction(as_told, 1)
        file = tmp_path / "pids"
        calls = calls_of({}, {"do": "start and hang", "file": str(file)}, {}, num_joint=1)
        assert workers.score(reward, calls).rows == [[[0.0]], [[-1.0]], [[2.0]]]
        pids = [int(pid) for pid in file.read_text().split()]
        assert os.getpid() not in pids
        assert eventually(lambda: not any(map(in_child, pids)))

    def test_workers_stay_and_keep_their_own_state(self) -> None:
        counter = Counter()
        workers, reward = RewardWorkers(1, "process"), RewardFunction(counter, 1)
        # Two turns of two calls by one worker; the object here is never called.
        assert [workers.score(reward, calls_of({}, {}, num_joint=1)).rows for _ in range(2)] == [
            [[[1.0]], [[2.0]]],
            [[[3.0]], [[4.0]]],
        ]
        assert counter.calls == 0
        # Another function gets workers of its own, and so does a copy.
        assert workers.score(RewardFunction(counter, 1), calls_of({}, num_joint=1)).rows == [[[1.0]]]
        assert vars(copy.deepcopy(workers))["_processes"] == []
        assert pickle.loads(pickle.dumps(workers)).num_workers == 1

    def test_exceptions_that_cannot_travel_are_named(self) -> None:
        with pytest.raises(RuntimeError, match=r"tests.rollouts.reward_functions.OddError: leftright") as error:
            score(as_told, told("raise odd"), 1, "process")
        assert not isinstance(error.value, OddError)
        assert "for task item 10 " in error.value.__notes__[0]

    def test_functions_that_cannot_travel_are_named(self) -> None:
        with pytest.raises(
            ValueError, match=r"reward_func=.*<lambda> cannot be sent to a worker process: .* or use reward_backend="
        ):
            RewardWorkers(1, "process").check(RewardFunction(lambda first: [0.0], 1))
        RewardWorkers(1, "thread").check(RewardFunction(lambda first: [0.0], 1))
        with pytest.raises(
            ValueError, match=r"reward_func=\S+PickyState cannot be loaded in a worker process: LookupError: no such"
        ):
            score(PickyState(), calls_of({}), 1, "process")

    def test_items_that_cannot_travel_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"task item 10 .* cannot be sent to a worker process: .*_thread.lock"):
            score(lengths, calls_of({"lock": threading.Lock()}), 1, "process")

    def test_ctrl_c_ends_them(self, tmp_path: Path) -> None:
        file = tmp_path / "pids"
        workers, reward = RewardWorkers(1, "process"), RewardFunction(as_told, 1)

        def interrupt() -> None:
            appears(file)
            signal.raise_signal(signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            workers.score(reward, calls_of({"do": "start and hang", "file": str(file)}, num_joint=1))
        pids = [int(pid) for pid in file.read_text().split()]
        assert eventually(lambda: not any(map(in_child, pids)))
        assert workers.score(reward, told("score")).rows == [[[0.0]]]

    @pytest.mark.slow
    def test_modes_of_torch(self) -> None:
        # The first call imports torch; each finds float32 (32 bits) and gradients (100), and changes both.
        assert score(modes, calls_of({}, {}, num_joint=1), 1, "process") == [[[132.0]], [[132.0]]]


SCRIPT = """
import os, sys, threading

if __name__ == "__main__":
    from comlrl_lightning.environment.reward import RewardCall, RewardFunction
    from comlrl_lightning.environment.reward_workers import RewardWorkers
    from tests.rollouts.reward_functions import as_told

    backend, number = sys.argv[1], int(sys.argv[2])
    call = RewardCall([["a"]], {"number": 0, "do": "start and hang", "file": sys.argv[3]}, None, 1)
    workers = RewardWorkers(1, backend, 1.0 if number == 0 else None)
    if number:
        def send():
            while not os.path.exists(sys.argv[3]):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), number)
        threading.Thread(target=send, daemon=True).start()
    workers.score(RewardFunction(as_told, 1), [call])
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (0, 1, "TimeoutError: reward_func="),
        (signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        (signal.SIGTERM, -signal.SIGTERM, ""),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_no_program_hangs_at_its_end(tmp_path: Path, backend: str, number: int, code: int, said: str) -> None:
    script, file = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    with (tmp_path / "stderr").open("w") as stderr:  # not a pipe: what is left behind would hold it open
        started = subprocess.run(
            [sys.executable, str(script), backend, str(int(number)), str(file)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=stderr,
            timeout=PATIENCE_SECONDS,
        )
    assert started.returncode == code
    assert said in (tmp_path / "stderr").read_text()
    pids = [int(pid) for pid in file.read_text().split()]
    if backend == "thread":
        os.kill(pids.pop(), signal.SIGKILL)  # what a thread has started is nobody's to end
    assert eventually(lambda: not any(map(in_child, pids)))
