"""Who moves in an update and by how much: silent groups, signs, buffers, learning rates, norms, broken numbers."""

from __future__ import annotations

import hashlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from comlrl_lightning.agents.settings import Separate, SharedBase
from comlrl_lightning.algorithms import MAGRPO, MAREINFORCE, MARLOO, POLICY_GRADIENT_ALGORITHMS, CooperativeModule
from tests.algorithms.support import (
    ITEMS,
    Collected,
    Kind,
    MemoryLogger,
    RecordingSGD,
    echo,
    fit,
    make_module,
    tiny_agents,
    trained_a_little,
    uneven_reward,
    weights,
)
from tests.tiny_lm import save_tiny

Step = list[list[Tensor | None]]


def flat_reward(*completions: list[str]) -> list[float]:
    return [0.0] * len(completions[0])


class Trace(Callback):
    """What the module looks like after every training step."""

    def __init__(self) -> None:
        self.weights: list[list[dict[str, Tensor]]] = []
        self.update_steps: list[int] = []
        self.env_steps: list[int] = []
        self.learning_rates: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        self.weights.append([weights(pl_module, agent) for agent in range(pl_module.num_agents)])
        self.update_steps.append(pl_module.update_step)
        self.env_steps.append(pl_module.env_step)
        self.learning_rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def recorded(trainer: Trainer) -> list[Step]:
    return cast("RecordingSGD", trainer.optimizers[0]).recorded


def gradients(algorithm: type[CooperativeModule], items: list[dict[str, Any]], **settings: Any) -> Step:
    """Gradients of the one step of a fit on all items at once."""
    module = trained_a_little(make_module(algorithm, optimizer=RecordingSGD, max_grad_norm=None, **settings))
    (step,) = recorded(fit(module, items, len(items)))
    return step


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def reward_of(*judged: int) -> Any:
    """A reward that depends on some agents only, and only for items that say ``"judge": True``."""

    def reward(*completions: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
        spoken = [texts if agent in judged else [""] * len(texts) for agent, texts in enumerate(completions)]
        scores = uneven_reward(*spoken)
        return scores if batch_items[0].get("judge", True) else [0.35] * len(scores)

    return reward


class TestSilentGroups:
    def test_a_silent_item_halves_the_gradient_of_the_other(self) -> None:
        # The mean over two nodes, one of them without advantages.
        loud, silent = {"prompt": "hi"}, {"prompt": "there", "judge": False}
        alone = gradients(MAGRPO, [loud], reward_func=reward_of(0, 1))
        both = gradients(MAGRPO, [loud, silent], reward_func=reward_of(0, 1))
        for group, halved in zip(alone, both, strict=True):
            for gradient, half in zip(group, halved, strict=True):
                assert gradient is not None
                torch.testing.assert_close(half, gradient / 2, rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize("kind", ["shared", "separate", "full"])
    def test_an_agent_without_any_advantage_is_not_moved(self, kind: Kind) -> None:
        # Both agents learn from item 0, so that AdamW has momentum and weight decay to move them with; at item 1 all
        # combinations with a completion of agent 0 have the same mean reward.
        def reward(first: list[str], second: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
            judged = [0, 1] if batch_items[0]["both"] else [1]
            return list(reward_of(*judged)(first, second, batch_items=batch_items))

        items = [{"prompt": "hi", "both": True}, {"prompt": "there", "both": False}]
        trace = Trace()
        module = make_module(MAGRPO, tiny_agents(kind), reward_func=reward, joint_mode="cross", agent_learning_rate=0.1)
        start = [weights(trained_a_little(module), agent) for agent in (0, 1)]
        fit(module, items, 1, [trace])
        first, second = trace.weights
        assert not same(first[0], start[0])
        assert not same(first[1], start[1])
        assert same(second[0], first[0])
        assert not same(second[1], first[1])


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


class TestWhoMoves:
    @pytest.mark.parametrize("kind", ["shared", "separate"])
    def test_everyone_with_advantages_and_nobody_else(self, kind: Kind) -> None:
        module = make_module(MAGRPO, tiny_agents(kind, 3), reward_func=reward_of(0, 2), joint_mode="cross")
        module.configure_model()
        start = [weights(module, agent) for agent in range(3)]
        frozen = frozen_digest(module)
        fit(module)
        moved = [not same(weights(module, agent), start[agent]) for agent in range(3)]
        assert moved == [True, False, True]
        assert frozen_digest(module) == frozen

    def test_fresh_adapters_leave_their_zeros(self) -> None:
        module = make_module(MAGRPO, agent_learning_rate=0.01)
        module.configure_model()
        ups = [name for name in module.team.agent_parameters(1) if "lora_B" in name]
        assert not any(weights(module, 1)[name].any() for name in ups)
        fit(module)
        assert all(weights(module, 1)[name].any() for name in ups)

    @pytest.mark.parametrize("algorithm", [MAREINFORCE, MAGRPO, MARLOO])
    def test_the_opposite_reward_has_the_opposite_gradient(self, algorithm: type[CooperativeModule]) -> None:
        def opposite(*completions: list[str]) -> list[float]:
            return [-value for value in uneven_reward(*completions)]

        plain, flipped = gradients(algorithm, ITEMS[:1]), gradients(algorithm, ITEMS[:1], reward_func=opposite)
        for group, other in zip(plain, flipped, strict=True):
            for gradient, negative in zip(group, other, strict=True):
                assert gradient is not None
                assert negative is not None
                torch.testing.assert_close(negative, -gradient, rtol=1e-9, atol=1e-12)
            assert any(gradient is not None and gradient.any() for gradient in group)

    def test_the_baselines_differ(self) -> None:
        # R has K=3: MARLOO is 3/2 MAGRPO, the others point elsewhere.
        steps = {
            algorithm.__name__: torch.cat(
                [
                    gradient.flatten()
                    for group in gradients(algorithm, ITEMS[:1], num_generations=3, advantage_normalization=False)
                    for gradient in group
                    if gradient is not None
                ]
            )
            for algorithm in POLICY_GRADIENT_ALGORITHMS
        }
        torch.testing.assert_close(steps["MARLOO"], 1.5 * steps["MAGRPO"], rtol=1e-6, atol=1e-6)
        directions = [steps[name] / steps[name].norm() for name in ("MAREINFORCE", "MAGRPO", "MAReMax")]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert abs(float(directions[one] @ directions[other])) < 0.99


def frozen_digest(module: CooperativeModule) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        if not parameter.requires_grad:
            digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


class TestBuffer:
    def test_it_is_used_when_full_and_at_the_last_batch(self) -> None:
        # One node per step, three fill the buffer; the fourth item is the epoch's last.
        trace = Trace()
        module = make_module(MAGRPO, rollout_buffer_size=3)
        trainer = fit(module, ITEMS, 1, [trace])
        assert trace.update_steps == [0, 0, 1, 2]
        assert trace.env_steps == [2, 4, 6, 8]
        assert trainer.global_step == 2
        assert module.buffer == []

    def test_every_epoch_ends_with_an_update(self) -> None:
        trace = Trace()
        fit(make_module(MAGRPO, rollout_buffer_size=3), ITEMS[:2], 1, [trace], max_epochs=2)
        assert trace.update_steps == [0, 1, 1, 2]

    def test_mini_batches_are_shuffled_by_digests(self) -> None:
        # Python's own hash may change with its version: the order is that of numpy's Philox, whose key is BLAKE2b of
        # "(1, 6, 2)": seed, env_step and number of the pass.
        module = make_module(MAGRPO)
        module.env_step = 6
        key = int.from_bytes(hashlib.blake2b(b"(1, 6, 2)", digest_size=16).digest(), "big")
        expected = np.random.Generator(np.random.Philox(key=key)).permutation(9).tolist()
        assert module._order(9, 2) == expected != list(range(9))
        assert module._order(9, 1) != expected

    def test_without_a_size_every_step_is_an_update(self) -> None:
        trace = Trace()
        fit(make_module(MAGRPO), ITEMS, 2, [trace])
        assert trace.update_steps == [1, 2]

    def test_another_epoch_samples_anew(self) -> None:
        collected = Collected()
        fit(make_module(MAGRPO, agent_learning_rate=0.0), ITEMS[:2], 2, [collected], max_epochs=2)
        first, second = collected.rollouts
        assert first.nodes[0].completions != second.nodes[0].completions

    @pytest.mark.parametrize(
        ("settings", "num_steps"),
        [
            ({"num_inner_epochs": 2}, 2),
            ({"train_batch_size": 3}, 2),  # four nodes: 3 and 1
            ({"train_batch_size": 3, "num_inner_epochs": 2}, 4),
        ],
    )
    def test_several_optimizer_steps_warn_without_a_clip(self, settings: dict[str, Any], num_steps: int) -> None:
        module = make_module(MAGRPO, **settings)
        with pytest.warns(UserWarning, match=f"{num_steps} optimizer steps use the same rollouts without clipping"):
            trainer = fit(module, ITEMS, 4)
        assert trainer.global_step == num_steps

    def test_a_tree_larger_than_the_mini_batch_warns_too(self) -> None:
        # One item with two turns: three nodes, one per optimizer step.
        module = make_module(MAGRPO, num_turns=2, rollout_buffer_size=1, train_batch_size=1)
        with pytest.warns(UserWarning, match="3 optimizer steps use the same rollouts without clipping"):
            fit(module, ITEMS[:1], 1)

    @pytest.mark.parametrize("settings", [{}, {"num_inner_epochs": 2, "clip_epsilon": 0.2}])
    def test_no_warning(self, settings: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*use the same rollouts")
            fit(make_module(MAGRPO, **settings), ITEMS, 4)


class TestSteps:
    def test_each_agent_has_its_learning_rate(self) -> None:
        module = make_module(MAGRPO, agent_learning_rate=[0.5, 0.0625], optimizer=RecordingSGD, max_grad_norm=None)
        start = [weights(trained_a_little(module), agent) for agent in (0, 1)]
        (step,) = recorded(fit(module))
        for agent, rate in enumerate((0.5, 0.0625)):
            now = weights(module, agent)
            for (name, before), gradient in zip(start[agent].items(), step[agent], strict=True):
                assert gradient is not None
                torch.testing.assert_close(now[name], before - rate * gradient)

    @pytest.mark.parametrize(("kind", "expected"), [("shared", 1e-4), ("separate", 1e-4), ("full", 5e-6)])
    def test_default_learning_rates(self, kind: Kind, expected: float) -> None:
        module = make_module(MAGRPO, tiny_agents(kind))
        module.configure_model()
        assert module.learning_rates == [expected, expected]

    def test_adapter_folders_get_the_rate_of_adapters(self, tmp_path: Path) -> None:
        model = save_tiny(tmp_path / "model")
        module = make_module(MAGRPO, SharedBase(model, num_agents=1), reward_func=flat_reward)
        module.configure_model()
        module.save_agents(tmp_path)
        agents = Separate([str(tmp_path / "agent_0"), model])
        mixed = make_module(MAGRPO, agents)
        mixed.configure_model()
        assert mixed.learning_rates == [1e-4, 5e-6]

    def test_the_schedule_steps_once_per_optimizer_step(self) -> None:
        # Two nodes fill the buffer; three passes make three steps: 1 -> 1/8 -> 1/64.
        trace = Trace()
        module = make_module(
            MAGRPO,
            agent_learning_rate=[1.0, 0.5],
            lr_scheduler=halving,
            optimizer=partial(torch.optim.SGD, momentum=0.0),
            rollout_buffer_size=2,
            num_inner_epochs=3,
            clip_epsilon=0.2,
            max_grad_norm=1e-3,
        )
        fit(module, ITEMS, 1, [trace])
        assert trace.learning_rates == [[1.0, 0.5], [1 / 8, 1 / 16], [1 / 8, 1 / 16], [1 / 64, 1 / 128]]

    def test_norms_are_clipped_per_agent(self) -> None:
        norm = 0.01
        module = trained_a_little(make_module(MAGRPO, optimizer=RecordingSGD, max_grad_norm=norm))
        trainer = fit(module)
        (step,) = recorded(trainer)
        for agent, group in enumerate(step):
            total = torch.stack([gradient.norm() for gradient in group if gradient is not None]).norm()
            torch.testing.assert_close(float(total), norm, rtol=1e-3, atol=0.0)
            assert trainer.callback_metrics[f"agent_{agent}/grad_norm"] > 0.1  # as it was before
            assert trainer.callback_metrics[f"agent_{agent}/clipped_update_share"] == 1.0

    @pytest.mark.parametrize("limit", [1e6, None])
    def test_norms_below_the_limit_are_not_clipped(self, limit: float | None) -> None:
        trainer = fit(make_module(MAGRPO, max_grad_norm=limit))
        for agent in (0, 1):
            assert trainer.callback_metrics[f"agent_{agent}/grad_norm"] > 0.1
            assert trainer.callback_metrics[f"agent_{agent}/clipped_update_share"] == 0.0

    def test_groups_are_named(self) -> None:
        trainer = fit(make_module(MAGRPO))
        assert [group["name"] for group in trainer.optimizers[0].param_groups] == ["agent_0", "agent_1"]


class TestNonfinite:
    """A reward of 3e38 times a log-probability overflows to infinity in single precision."""

    def module(self, **settings: Any) -> CooperativeModule:
        def reward(first: list[str], second: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
            return [3e38, 0.0] if batch_items[0]["prompt"] == "hi" else [1.0, 0.0]

        agents = tiny_agents(dtype=torch.float32)
        return make_module(MAGRPO, agents, reward_func=reward, advantage_normalization=False, **settings)

    def test_it_stops_the_training(self) -> None:
        with pytest.raises(ValueError, match=r"agent_0 is not finite at env_step 2.*on_nonfinite='skip'"):
            fit(self.module(), ITEMS[:1], 1)

    def test_it_can_be_left_out_and_is_counted(self) -> None:
        module, trace = self.module(on_nonfinite="skip"), Trace()
        module.configure_model()
        start = [weights(module, agent) for agent in (0, 1)]
        with pytest.warns(UserWarning, match=r"An update was left out: .*agent_0, agent_1 are not finite"):
            fit(module, ITEMS[:2], 1, [trace], log_every_n_steps=1)
        assert trace.update_steps == [0, 1]
        assert same(trace.weights[0][0], start[0])
        assert not same(trace.weights[1][0], start[0])

    def test_the_count_is_logged(self) -> None:
        with pytest.warns(UserWarning, match="An update was left out"):
            trainer = fit(self.module(on_nonfinite="skip"), ITEMS[:1], 1)
        assert trainer.callback_metrics["nonfinite_updates"] == 1.0


def test_a_tree_credits_each_agent_with_its_own_rewards() -> None:
    def reward(first: list[str], second: list[str]) -> list[list[float]]:
        return [[float(k), -3.0 * k] for k in range(len(first))]

    module = make_module(
        MAGRPO, reward_func=reward, per_agent_rewards=True, advantage_normalization=False, num_generations=3
    )
    fit(module, ITEMS[:1], 1)
    assert module.rollouts is not None
    buffer = module.learner.credit(module.rollouts, 1.0)
    assert buffer[0].returns == ((0.0, 1.0, 2.0), (0.0, -3.0, -6.0))
    # Minus the means 1 and -3 of the groups.
    (values,) = module.learner.advantages(buffer, 1, None)
    assert [one.tolist() for one in values] == [[-1.0, 0.0, 1.0], [3.0, 0.0, -3.0]]


def test_a_rewarded_stop_warns_once() -> None:
    module = make_module(
        MAGRPO,
        reward_func=lambda first, second: [1.0] * len(first),
        external_transition=echo,
        num_turns=2,
        early_termination_threshold=0.5,
    )
    with pytest.warns(UserWarning, match="stopped a joint completion with a positive reward") as caught:
        fit(module, ITEMS, 1)
    assert sum("stopped a joint" in str(warning.message) for warning in caught) == 1
    assert module.env_step == 4 * 2


class TestLogging:
    def rows(self, logging_steps: int) -> list[tuple[int | None, dict[str, float]]]:
        """What is logged over six items of K=2, whose rewards are 0 and twice the item's number."""

        def reward(first: list[str], second: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
            return [0.0, 2.0 * batch_items[0]["number"]]

        logger = MemoryLogger()
        items = [{"prompt": "hi", "number": number} for number in range(6)]
        fit(make_module(MAGRPO, reward_func=reward, logging_steps=logging_steps), items, 1, logger=logger)
        return logger.rows

    def test_every_step_has_its_row_at_its_env_step(self) -> None:
        rows = self.rows(1)
        assert [step for step, _ in rows] == [2, 4, 6, 8, 10, 12]
        assert [metrics["turn_1/reward_mean"] for _, metrics in rows] == [0, 1, 2, 3, 4, 5]
        assert [metrics["env_step"] for _, metrics in rows] == [2, 4, 6, 8, 10, 12]

    def test_a_row_is_the_mean_of_all_since_the_last(self) -> None:
        # At least five env_steps apart: items 0 to 2, then 3 to 5.
        rows = self.rows(5)
        assert [(step, metrics["turn_1/reward_mean"]) for step, metrics in rows] == [(6, 1), (12, 4)]
        assert rows[1][1]["agent_1/zero_advantage_share"] == 0.0
