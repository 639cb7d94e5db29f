"""Steps 34 to 50 keep no more than steps 10 to 26 did: neither tensors nor other objects.

Measured in an interpreter that traces its memory from its start, ``python -X tracemalloc -m tests.faults.test_memory``:
with a later start, what takes the place of older memory would look like growth.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms import MADPO, MAGRPO, CooperativeModule
from comlrl_lightning.callbacks.support import batches_trained
from comlrl_lightning.data.datamodule import TaskDataModule
from tests.algorithms.support import make_trainer, tiny_agents, uneven_reward
from tests.faults.registry import Fault, faults
from tests.waiting import PATIENCE_SECONDS

STEPS = 50
EARLY, LATE = range(10, 27, 8), range(34, STEPS + 1, 8)
"""Steps after which memory is looked at: at all of them, the same of what buffers and rounds keep is there."""
ALLOWED_BYTES = 100_000
"""Two kilobytes per step; the weights of one agent alone are more."""
SETTINGS: dict[type[CooperativeModule], dict[str, Any]] = {
    MAGRPO: {"num_generations": 2, "rollout_buffer_size": 2},
    MADPO: {"num_candidates": 2},
}
OUTCOME = "steps 34 to 50 keep no more tensors alive than steps 10 to 26, and less than 0.1 MB (1 %) more memory"


class Look(Callback):
    """Live tensors and traced bytes, by step."""

    def __init__(self) -> None:
        self.tensors: dict[int, int] = {}
        self.traced: dict[int, int] = {}

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        step = batches_trained(trainer)
        if step in EARLY or step in LATE:
            gc.collect()
            # `isinstance` would wake objects that only pretend to be others.
            self.tensors[step] = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
            self.traced[step] = tracemalloc.get_traced_memory()[0]

    def least(self) -> dict[str, int]:
        """The smallest values: what a step logs differs, but what grows is never small again."""
        return {
            f"{when} {what}": min(by_step[step] for step in steps)
            for what, by_step in (("tensors", self.tensors), ("bytes", self.traced))
            for when, steps in (("early", EARLY), ("late", LATE))
        }


def measured(algorithm: type[CooperativeModule]) -> dict[str, int]:
    """A run of two items per epoch: all the moments are in epochs in which a round of MADPO learns."""
    agents, look = tiny_agents(dtype=torch.float32), Look()
    module = algorithm(agents, uneven_reward, sampling=Sampling(max_new_tokens=3), **SETTINGS[algorithm])
    trainer = make_trainer([look], max_epochs=STEPS // 2 + 1)
    trainer.fit(module, TaskDataModule([{"prompt": "hi"}, {"prompt": "you"}]))
    return look.least()


@pytest.fixture(scope="module")
def measurements() -> dict[str, dict[str, int]]:
    """By algorithm."""
    command = [sys.executable, "-X", "tracemalloc", "-m", "tests.faults.test_memory"]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=2 * PATIENCE_SECONDS)
    found: dict[str, dict[str, int]] = json.loads(ended.stdout.splitlines()[-1])
    return found


CASES = (
    Fault("memory", "50 steps of MAGRPO with a buffer that fills in two steps", OUTCOME),
    Fault("memory", "50 steps of MADPO in rounds of two epochs", OUTCOME),
)


@faults(*CASES, slow=frozenset(CASES))
def test_nothing_grows(fault: Fault, measurements: dict[str, dict[str, int]]) -> None:
    found = measurements["MADPO" if "MADPO" in fault.tried else "MAGRPO"]
    assert found["late tensors"] <= found["early tensors"]
    assert found["late bytes"] - found["early bytes"] < ALLOWED_BYTES < 0.01 * found["early bytes"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({algorithm.__name__: measured(algorithm) for algorithm in (MAGRPO, MADPO)}))
