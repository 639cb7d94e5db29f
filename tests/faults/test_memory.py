"""Steps 34 to 50 keep no more than steps 10 to 26 did: neither tensors nor other objects."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms import MADPO, MAGRPO, CooperativeModule
from comlrl_lightning.callbacks.support import batches_trained
from comlrl_lightning.data import TaskDataModule
from tests.algorithms.support import make_trainer, tiny_agents, uneven_reward
from tests.faults.registry import Fault, faults

STEPS = 50
EARLY, LATE = range(10, 27, 4), range(34, STEPS + 1, 4)
"""Steps after which memory is looked at: at all of them, the same of what buffers and rounds keep is there."""


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


SETTINGS: dict[type[CooperativeModule], dict[str, Any]] = {
    MAGRPO: {"num_generations": 2, "rollout_buffer_size": 2},
    MADPO: {"num_candidates": 2},
}
OUTCOME = "steps 34 to 50 keep no more tensors alive than steps 10 to 26, and at most 1 % more memory"


def least(by_step: dict[int, int], steps: range) -> int:
    """The smallest value: what a step logs differs, but what grows is never small again."""
    return min(by_step[step] for step in steps)


CASES = (
    Fault("memory", "50 steps of MAGRPO with a buffer that fills in two steps", OUTCOME),
    Fault("memory", "50 steps of MADPO in rounds of two epochs", OUTCOME),
)


@faults(*CASES, slow=frozenset(CASES))
def test_nothing_grows(fault: Fault) -> None:
    algorithm: type[CooperativeModule] = MADPO if "MADPO" in fault.tried else MAGRPO
    agents = tiny_agents(dtype=torch.float32)
    module = algorithm(agents, uneven_reward, sampling=Sampling(max_new_tokens=3), **SETTINGS[algorithm])
    look = Look()
    tracemalloc.start()
    try:
        # Two items: all these steps are the first of an epoch in which a round of MADPO learns.
        trainer = make_trainer([look], max_epochs=STEPS // 2 + 1)
        trainer.fit(module, TaskDataModule([{"prompt": "hi"}, {"prompt": "you"}]))
    finally:
        tracemalloc.stop()
    assert least(look.tensors, LATE) <= least(look.tensors, EARLY)
    assert least(look.traced, LATE) <= 1.01 * least(look.traced, EARLY)
