"""Actor-critic fits of tiny teams: who moves, who is stepped how often, what is saved, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comlrl_lightning.agents.settings import SharedBase
from comlrl_lightning.algorithms import IAC, MAAC, ActorCriticModule
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.rewards import WeightedRewards
from tests.algorithms.support import (
    ITEMS,
    LORA,
    Collected,
    fit,
    make_module,
    make_trainer,
    uneven_reward,
)
from tests.tiny_lm import save_tiny, tiny_gpt2, tiny_tokenizer

UNLOADED = SharedBase("not/loaded", num_agents=2)
ADAPTER = AdapterCritic(lora=LORA)


def gpt2_critic() -> ModelCritic:
    """Another family with another tokenizer."""
    return ModelCritic(model=tiny_gpt2(seed=5).double(), tokenizer=tiny_tokenizer(reverse=True))


def gpt2_critics() -> ModelCritic:
    models = [tiny_gpt2(seed=seed).double() for seed in (5, 6)]
    return ModelCritic(models=models, tokenizers=[tiny_tokenizer(reverse=True)] * 2, lora=LORA)


KINDS = [(IAC, ValueHead), (IAC, lambda: ADAPTER), (IAC, gpt2_critics), (MAAC, lambda: ADAPTER), (MAAC, gpt2_critic)]


def group(module: ActorCriticModule, name: str) -> dict[str, Tensor]:
    """A copy of the weights of a parameter group."""
    return {path: value.detach().clone() for path, value in module.learner.parameter_groups()[name].items()}


def moved(module: ActorCriticModule, name: str, start: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, start[path]) for path, value in group(module, name).items())


def own_rewards(scale: float) -> Any:
    """Each agent earns what it says; the first agent's rewards are scaled."""

    def reward(first: list[str], second: list[str]) -> list[list[float]]:
        return [[scale * one, other] for one, other in zip(uneven_reward(first), uneven_reward(second), strict=True)]

    return reward


def needs_prompts(first: list[str], second: list[str], prompts: list[str]) -> list[float]:
    """A reward that reads both prompts."""
    return [float(len(prompts))] * len(first)


class TestWhoMoves:
    @pytest.mark.filterwarnings("ignore:critic was to read 129 tokens")
    @pytest.mark.parametrize(("algorithm", "critic"), KINDS)
    @pytest.mark.parametrize("critic_type", ["v", "q"])
    def test_every_agent_and_every_critic(
        self, algorithm: type[ActorCriticModule], critic: Any, critic_type: str
    ) -> None:
        module = make_module(algorithm, critic=critic(), critic_type=critic_type, num_turns=2, agent_learning_rate=0.01)
        module.configure_model()
        names = list(module.learner.parameter_groups())
        start = {name: group(module, name) for name in names}
        frozen = [value.clone() for value in module.parameters() if not value.requires_grad]
        trainer = fit(module, ITEMS, 2)
        assert names == ["agent_0", "agent_1", *(["critic"] if algorithm is MAAC else ["critic_0", "critic_1"])]
        assert [entry["name"] for entry in trainer.optimizers[0].param_groups] == names
        assert all(moved(module, name, start[name]) for name in names)
        still = [value for value in module.parameters() if not value.requires_grad]
        assert all(torch.equal(value, before) for value, before in zip(still, frozen, strict=True))

    def test_a_value_head_trains_the_agents_adapter(self) -> None:
        # Equal rewards for the same prompts leave no advantage: what moves the adapter is the value loss alone.
        settings: dict[str, Any] = {
            "reward_func": lambda first, second: [1.0] * len(first),
            "num_generations": 4,
            "agent_learning_rate": 0.01,
            "critic_learning_rate": 0.1,
        }
        shared = make_module(IAC, critic=ValueHead(), **settings)
        apart = make_module(IAC, critic=ADAPTER, **settings)
        for module, expected in ((shared, True), (apart, False)):
            module.configure_model()
            start = group(module, "agent_0")
            fit(module, ITEMS[:1], 1, max_epochs=2)
            assert moved(module, "agent_0", start) is expected

    def test_a_buffer_of_one_sample_trains(self) -> None:
        for algorithm in (IAC, MAAC):
            module = make_module(algorithm, num_generations=1, reward_func=lambda a, b: [1.0], agent_learning_rate=0.01)
            module.configure_model()
            start = {name: group(module, name) for name in module.learner.parameter_groups()}
            fit(module, ITEMS[:1], 1)
            assert all(moved(module, name, before) for name, before in start.items())

    def test_one_joint_sample_is_one_step_of_the_central_critic(self) -> None:
        module = make_module(MAAC, num_generations=1, reward_func=lambda a, b: [1.0])
        optimizer = fit(module, ITEMS[:1], 1).optimizers[0]
        for name, parameters in module.learner.parameter_groups().items():
            assert {int(optimizer.state[one]["step"]) for one in parameters.values()} == {1}, name


class TestPerAgentRewards:
    def trained(self, algorithm: type[ActorCriticModule], scale: float) -> ActorCriticModule:
        module = make_module(
            algorithm,
            critic=ADAPTER,
            reward_func=own_rewards(scale),
            per_agent_rewards=True,
            agent_learning_rate=0.01,
            num_generations=3,
        )
        fit(module, ITEMS[:2], 2)
        return module

    @pytest.mark.parametrize("algorithm", [IAC, MAAC])
    def test_one_agents_scale_leaves_the_others_update(self, algorithm: type[ActorCriticModule]) -> None:
        small, large = self.trained(algorithm, 1.0), self.trained(algorithm, 100.0)
        for name, value in group(small, "agent_1").items():
            assert torch.equal(value, group(large, "agent_1")[name])
        if algorithm is IAC:
            assert not moved(large, "critic_1", group(small, "critic_1"))
            assert moved(large, "critic_0", group(small, "critic_0"))
        else:
            assert module_outputs(large) == 2

    def test_weighted_rewards_have_one_number(self) -> None:
        reward = WeightedRewards({"length": uneven_reward})
        with pytest.raises(ValueError, match="per_agent_rewards=True does not go with WeightedRewards"):
            make_module(IAC, UNLOADED, reward_func=reward, per_agent_rewards=True)


def module_outputs(module: ActorCriticModule) -> int:
    assert isinstance(module, ActorCriticModule)
    return module.critics.num_outputs


class TestCounting:
    def test_env_step_counts_trajectories(self) -> None:
        # K=2, T=2 on two items: 2 * 2 * 2.
        module, collected = make_module(MAAC, num_turns=2), Collected()
        fit(module, ITEMS[:2], 2, [collected])
        assert module.env_step == collected.rollouts[0].num_scored == 8
        assert {len(node.rewards) for node in collected.rollouts[0].nodes} == {1}

    def test_buffers_count_turns_of_trajectories(self) -> None:
        # Four nodes per item, a buffer of 8, mini-batches of 4: an update of two steps after two items.
        module = make_module(IAC, num_turns=2, rollout_buffer_size=8, train_batch_size=4, clip_epsilon=0.2)
        assert fit(module, ITEMS, 1).global_step == 4


class TestSaving:
    @pytest.mark.parametrize(
        ("algorithm", "critic", "again"),
        [
            (IAC, ValueHead(), lambda folder: ValueHead(heads=[f"{folder}/agent_0", f"{folder}/agent_1"])),
            (IAC, ADAPTER, lambda folder: AdapterCritic(adapters=[f"{folder}/critic_0", f"{folder}/critic_1"])),
            (MAAC, ADAPTER, lambda folder: AdapterCritic(adapters=[f"{folder}/critic"])),
            (MAAC, None, lambda folder: ModelCritic(model=f"{folder}/critic")),
        ],
    )
    def test_critics_stand_beside_the_agents_and_load_again(
        self, algorithm: type[ActorCriticModule], critic: Any, again: Any, tmp_path: Path
    ) -> None:
        base = save_tiny(tmp_path / "base")
        other = save_tiny(tmp_path / "other", tiny_gpt2(seed=3), tiny_tokenizer(reverse=True))
        settings: dict[str, Any] = {"critic": critic or ModelCritic(model=other), "critic_learning_rate": 0.01}
        module = make_module(algorithm, SharedBase(base, num_agents=2, lora=LORA), **settings)
        fit(module, ITEMS, 2)
        module.save_agents(tmp_path / "saved")
        adapters = [str(tmp_path / "saved" / f"agent_{agent}") for agent in (0, 1)]
        agents = SharedBase(base, num_agents=2, adapters=adapters)
        loaded = make_module(algorithm, agents, critic=again(tmp_path / "saved"))
        loaded.configure_model()
        for name in module.learner.parameter_groups():
            assert not moved(loaded, name, group(module, name)), name


class TestSettings:
    @pytest.mark.parametrize(
        ("algorithm", "settings", "message"),
        [
            (MAAC, {"critic": ValueHead()}, r"critic=ValueHead\(\) reads the history of one agent"),
            (MAAC, {"critic": ModelCritic(models=["a", "b"])}, r"has 2 models for one central critic. Give model="),
            (IAC, {"critic": ModelCritic(models=["a"])}, r"has 1 models for 2 agents. Give one model per agent"),
            (IAC, {"critic": "adapter"}, r"critic='adapter' is no critic. Use ValueHead\(\), AdapterCritic\(\) or"),
            (IAC, {"critic_type": "a"}, r"critic_type='a' is unknown. Use one of 'v', 'q'"),
            (IAC, {"gae_lambda": 1.5}, r"gae_lambda=1.5 is out of range. Use a number from 0 to 1"),
            (IAC, {"value_loss_coef": 0.0}, r"value_loss_coef=0.0 is out of range"),
            (IAC, {"value_clip_range": -1.0}, r"value_clip_range=-1.0 is out of range"),
            (IAC, {"critic_learning_rate": -1.0}, r"critic_learning_rate=-1.0 is out of range"),
            (IAC, {"advantage_normalization": "group"}, r"advantage_normalization='group' is unknown"),
            (IAC, {"per_agent_rewards": 2}, r"per_agent_rewards=2 is neither True nor False"),
            (IAC, {"num_turns": 3, "max_nodes": 5}, r"grows to 6 nodes per task item, above max_nodes=5"),
        ],
    )
    def test_a_wrong_one_is_named(
        self, algorithm: type[ActorCriticModule], settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            make_module(algorithm, UNLOADED, **settings)

    @pytest.mark.parametrize(
        "reward",
        [
            needs_prompts,
            WeightedRewards({"part": needs_prompts}),
            WeightedRewards({"sum": WeightedRewards({"part": needs_prompts})}),
        ],
        ids=["bare", "part", "part of a part"],
    )
    def test_a_reward_that_needs_prompts_has_none_after_the_first_turn(self, reward: Callable[..., Any]) -> None:
        assert make_module(IAC, UNLOADED, reward_func=reward)
        with pytest.raises(
            ValueError, match=r"needs_prompts cannot be called with completions and no prompts, as after turn 1"
        ):
            make_module(IAC, UNLOADED, reward_func=reward, num_turns=2)

    def test_learning_rates(self) -> None:
        for critic, given, expected in ((ADAPTER, None, 1e-4), (gpt2_critic(), None, 5e-6), (ADAPTER, 0.5, 0.5)):
            module = make_module(MAAC, critic=critic, critic_learning_rate=given, agent_learning_rate=[0.1, 0.2])
            module.configure_model()
            assert module.learning_rates == [0.1, 0.2, expected]

    def test_a_resumed_run_keeps_its_critic(self, tmp_path: Path) -> None:
        module = make_module(MAAC, critic=ADAPTER)
        fit(module, ITEMS[:1], 1).save_checkpoint(tmp_path / "run.ckpt")
        other = make_module(MAAC, critic=AdapterCritic(lora=LORA, hidden_size=8))
        with pytest.raises(
            ValueError, match=r"critic.hidden_size=8 differs from the checkpoint's critic.hidden_size=None"
        ):
            make_trainer(max_epochs=2).fit(other, TaskDataModule(ITEMS[:1]), ckpt_path=tmp_path / "run.ckpt")
        other = make_module(MAAC, critic=ADAPTER, critic_type="q")
        with pytest.raises(ValueError, match=r"critic_type='q' differs from the checkpoint's critic_type='v'"):
            make_trainer(max_epochs=2).fit(other, TaskDataModule(ITEMS[:1]), ckpt_path=tmp_path / "run.ckpt")
