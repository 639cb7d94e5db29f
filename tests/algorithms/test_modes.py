"""Modes, precision and what a user's function sees during a real training step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from comlrl_lightning.agents.settings import SharedBase
from comlrl_lightning.algorithms import MAGRPO, CooperativeModule
from comlrl_lightning.environment.prompts import RewardFunction
from tests.algorithms.support import ITEMS, LORA, echo, fit, make_module, tiny_agents, uneven_reward, weights
from tests.tiny_lm import tiny_gpt2, tiny_tokenizer


class ModesSeen(Callback):
    """Whether the team was in training mode at the end of each step."""

    def __init__(self) -> None:
        self.training: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        self.training.append(all(module.training for module in pl_module.team.modules()))


class TestModes:
    def test_the_team_trains_in_training_mode(self) -> None:
        # Loaded models are in evaluation mode, where gradient checkpointing is silently off.
        modes = ModesSeen()
        fit(make_module(MAGRPO), ITEMS[:2], 1, [modes])
        assert modes.training == [True, True]

    def test_rollouts_run_in_evaluation_mode_without_gradients(self) -> None:
        seen: list[tuple[bool, bool]] = []
        module = make_module(MAGRPO)
        module.configure_model()
        body = next(part for name, part in module.named_modules() if name.endswith("embed_tokens"))

        def reward(*completions: list[str]) -> list[float]:
            hook.remove()
            return uneven_reward(*completions)

        hook = body.register_forward_hook(lambda *_: seen.append((body.training, torch.is_grad_enabled())))
        module.functions = replace(module.task_functions, reward=RewardFunction(reward, 2))
        fit(module)
        assert seen
        assert set(seen) == {(False, False)}

    @pytest.mark.parametrize("where", ["reward", "transition"])
    def test_they_come_back_when_a_users_function_fails(self, where: str) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise KeyError("mistake")

        module = make_module(
            MAGRPO,
            reward_func=fail if where == "reward" else uneven_reward,
            external_transition=fail if where == "transition" else echo,
            num_turns=2,
        )
        with pytest.raises(KeyError, match="mistake") as caught:
            fit(module, ITEMS[:2], 1)
        assert any("task item 0" in note and "at turn 1" in note for note in caught.value.__notes__)
        assert all(part.training for part in module.team.modules())
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float32

    def test_dropout_is_off_in_both(self) -> None:
        # GPT-2 comes with dropout .1: left on in the update, its log-probs would differ from the sampler's.
        agents = SharedBase(tiny_gpt2(), num_agents=2, lora=LORA, tokenizer=tiny_tokenizer())
        trainer = fit(make_module(MAGRPO, agents))
        assert trainer.callback_metrics["agent_0/sampler_gap"] < 1e-5


class TestPrecision:
    @pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
    def test_users_functions_see_single_precision_without_autocast(self, precision: str) -> None:
        seen: list[tuple[torch.dtype, torch.dtype]] = []

        def reward(*completions: list[str]) -> list[float]:
            ones = torch.ones(2, 2)
            seen.append((ones.dtype, (ones @ ones).dtype))
            return uneven_reward(*completions)

        fit(make_module(MAGRPO, tiny_agents(dtype=torch.float32), reward_func=reward), precision=precision)
        assert set(seen) == {(torch.float32, torch.float32)}

    @pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
    def test_adapters_stay_in_single_precision_and_move(self, precision: str) -> None:
        module = make_module(MAGRPO, tiny_agents(dtype=torch.float32), agent_learning_rate=1e-5)
        module.configure_model()
        start = [weights(module, agent) for agent in (0, 1)]
        trainer = fit(module, precision=precision)
        for agent in (0, 1):
            now = weights(module, agent)
            assert {value.dtype for value in now.values()} == {torch.float32}
            ups = [name for name in now if "lora_B" in name]
            assert all(not torch.equal(now[name], start[agent][name]) for name in ups)
        frozen = {parameter.dtype for parameter in module.parameters() if not parameter.requires_grad}
        assert frozen == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
        assert trainer.callback_metrics["agent_0/sampler_gap"] < 0.1

    def test_metrics_are_kept_in_double_precision(self) -> None:
        module = make_module(MAGRPO, tiny_agents(dtype=torch.float32))
        fit(module, precision="bf16-true")
        assert {value.dtype for value in module.training_metrics.state_dict().values()} == {torch.float64}
