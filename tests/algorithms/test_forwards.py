"""How often a training step calls the base model."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms import MAGRPO, CooperativeModule
from comlrl_lightning.data.datamodule import TaskDataModule
from tests.algorithms.support import ITEMS, make_module, make_trainer, tiny_agents


class Forwards(Callback):
    """Counts forward passes of the base model's body while completions are sampled."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, CooperativeModule)
        body = pl_module.team.models[0].get_submodule("network").get_base_model().model  # type: ignore[operator]
        body.register_forward_hook(self._called)

    def _called(self, module: Any, args: Any, output: Any) -> None:
        self.count += not module.training


@pytest.mark.parametrize(("num_agents", "num_items", "num_generations"), [(1, 1, 2), (2, 3, 2), (3, 4, 3)])
def test_one_prefill_and_the_longest_completion_per_turn(num_agents: int, num_items: int, num_generations: int) -> None:
    module = make_module(
        MAGRPO,
        tiny_agents(num_agents=num_agents),
        num_turns=2,
        num_generations=num_generations,
        sampling=Sampling(max_new_tokens=6),
    )
    forwards = Forwards()
    make_trainer([forwards]).fit(module, TaskDataModule(ITEMS[:num_items], batch_size=num_items))
    assert module.rollouts is not None
    longest = {
        turn: max(
            len(sample.token_ids)
            for node in module.rollouts.nodes
            if node.turn == turn
            for group in node.completions
            for sample in group
        )
        for turn in (1, 2)
    }
    # The prefill gives the first token of a turn, each further token takes one forward.
    assert forwards.count == sum(longest.values())
