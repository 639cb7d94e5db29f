"""A device per model: the same results as on one device, at the same time, with clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from comlrl_lightning import (
    IAC,
    MADPO,
    MAGRPO,
    AgentParallel,
    CooperativeModule,
    FixedModel,
    ModelCritic,
    Sampling,
    TaskDataModule,
    ValueHead,
)
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms.checkpoint import global_rng_states, restore_global_rng_states
from comlrl_lightning.cli import CooperativeCLI
from tests.algorithms.support import ITEMS, MemoryLogger, echo, make_trainer, tiny_agents, uneven_reward
from tests.second_device_run import CASES, RESUMED
from tests.tiny_lm import tiny_llama, tiny_tokenizer
from tests.waiting import PATIENCE_SECONDS

CPU = torch.device("cpu")


def made(algorithm: type[CooperativeModule] = MAGRPO, kind: Any = "full", **settings: Any) -> Any:
    """Two heterogeneous agents (Llama and Qwen2, token ids the other way round), several passes per update."""
    given = {"sampling": Sampling(max_new_tokens=4), "micro_batch_tokens": 40, "agent_learning_rate": 1e-3, "seed": 1}
    agents = tiny_agents(kind, dtype=torch.float32)
    return algorithm(agents, uneven_reward, **{**given, **settings})


def fitted(module: CooperativeModule, parallel: bool, **settings: Any) -> MemoryLogger:
    logger = MemoryLogger()
    if parallel:
        settings["strategy"] = AgentParallel(["cpu", "cpu"])
    trainer = make_trainer(logger=logger, **{"max_epochs": 2, **settings})
    trainer.fit(module, TaskDataModule(ITEMS, batch_size=2))
    return logger


class TestSameResults:
    @pytest.mark.parametrize(
        ("algorithm", "kind", "settings"),
        [
            (MAGRPO, "full", {"num_turns": 2, "external_transition": echo, "reference_kl_coef": 0.1}),
            (MAGRPO, "separate", {"clip_epsilon": 0.2, "num_inner_epochs": 2, "importance_level": "sequence"}),
            (MAGRPO, "full", {"sampling": Sampling(max_new_tokens=4, backend="transformers")}),
            (IAC, "full", {"critic": ValueHead(), "num_turns": 2, "external_transition": echo}),
            (IAC, "full", {}),
            (MADPO, "full", {"reference_free": False}),
        ],
    )
    def test_as_on_one_device_bit_for_bit(self, algorithm: type, kind: str, settings: dict[str, Any]) -> None:
        def run(parallel: bool) -> tuple[dict[str, Tensor], list[Any]]:
            extra = {
                "critic": ModelCritic(models=[tiny_llama(seed=s) for s in (7, 8)], tokenizers=[tiny_tokenizer()] * 2)
            }
            given = {**(extra if algorithm is IAC else {}), **settings}
            module = made(algorithm, kind, **given)
            rows = fitted(module, parallel).rows
            logged = [(step, {k: v for k, v in row.items() if not k.startswith("time/")}) for step, row in rows]
            return dict(module.named_parameters()), logged

        (weights, logged), (others, others_logged) = run(False), run(True)
        assert logged == others_logged
        assert all(torch.equal(value, others[name]) for name, value in weights.items())

    def test_a_run_changes_its_placement_with_a_checkpoint(self, tmp_path: Path) -> None:
        unbroken = made()
        fitted(unbroken, False)
        saver = ModelCheckpoint(tmp_path, filename="first", every_n_epochs=1)
        fitted(made(), True, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
        resumed = made()
        trainer = make_trainer(max_epochs=2)
        trainer.fit(resumed, TaskDataModule(ITEMS, batch_size=2), ckpt_path=str(tmp_path / "first.ckpt"))
        parameters = dict(resumed.named_parameters())
        assert all(torch.equal(value, parameters[name]) for name, value in unbroken.named_parameters())

    def test_random_states_of_more_devices_than_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Saved on three GPUs, resumed on one: the first state is taken, nobody asks for a second GPU.
        taken: list[tuple[int, int]] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: taken.append((int(state), device)))
        states = {**global_rng_states(), "cuda": [torch.tensor(5), torch.tensor(6), torch.tensor(7)]}
        restore_global_rng_states(states)
        assert taken == [(5, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, RESUMED])
def test_on_a_second_device(case: str, tmp_path: Path) -> None:
    # On a made-up kind of device that refuses tensors of others, in a process of its own. Rounding differs there
    # (another attention kernel), so 1e-12 in float64 after steps of 1e-3.
    out = tmp_path / "out.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.second_device_run", str(out), case]
    subprocess.run(command, check=True, timeout=2 * PATIENCE_SECONDS, env=environment, cwd=Path(__file__).parent.parent)
    result = json.loads(out.read_text())[case]
    if case == RESUMED:
        assert sorted(result) == ["one to two", "two to one"]
        assert max(result.values()) < 1e-12
    else:
        assert result["same_tokens"]
        assert result["num_tokens"] > 200
        assert result["moved"] > 1e-3
        assert result["difference"] < 1e-12


class TestPlacement:
    @contextmanager
    def placed(self, module: CooperativeModule, **devices: Any) -> Iterator[None]:
        """Agent 1 and all that is named on the device without memory, where nothing can be computed."""
        strategy = AgentParallel(["cpu", "cpu"])
        strategy.agent_devices = [CPU, torch.device("meta")]
        strategy.critic_device = devices.get("critic_device")
        strategy.reference_device = devices.get("reference_device")
        module.configure_model()
        strategy.connect(module)
        strategy.model_to_device()
        yield

    @staticmethod
    def devices(module: torch.nn.Module) -> set[str]:
        return {parameter.device.type for parameter in module.parameters()}

    def test_agents_and_references(self) -> None:
        module = made(reference_kl_coef=0.1)
        with self.placed(module):
            for model, device in zip(module.team.language_models(), ("cpu", "meta"), strict=True):
                assert self.devices(model) == {device}
            assert module.device == CPU
            assert module.team.concurrent

    def test_references_elsewhere(self) -> None:
        module = made(reference_kl_coef=0.1)
        with self.placed(module, reference_device=torch.device("meta")):
            frozen = [model.frozen for model in module.team.language_models()]
            assert [self.devices(model) for model in frozen if model is not None] == [{"meta"}, {"meta"}]
            assert self.devices(module.team.language_models()[0].network) == {"cpu"}

    def test_critics_stand_with_their_agents(self) -> None:
        models = [tiny_llama(seed=seed) for seed in (7, 8)]
        module = made(IAC, critic=ModelCritic(models=models, tokenizers=[tiny_tokenizer()] * 2))
        with self.placed(module):
            assert [self.devices(model) for model in module.critics.own_models] == [{"cpu"}, {"meta"}]
            assert [self.devices(head) for head in module.critics.heads] == [{"cpu"}, {"meta"}]
            assert module.critics.concurrent

    def test_critics_elsewhere(self) -> None:
        models = [tiny_llama(seed=seed) for seed in (7, 8)]
        module = made(IAC, critic=ModelCritic(models=models, tokenizers=[tiny_tokenizer()] * 2))
        with self.placed(module, critic_device=torch.device("meta")):
            assert self.devices(module.critics) == {"meta"}

    def test_heads_on_the_agents(self) -> None:
        module = made(IAC, critic=ValueHead())
        with self.placed(module):
            assert [self.devices(head) for head in module.critics.heads] == [{"cpu"}, {"meta"}]

    def test_a_fixed_comparator_follows(self) -> None:
        module = made()
        comparator = FixedModel(tiny_agents("full", dtype=torch.float32))
        with self.placed(module):
            comparator.sampler(module.team)
            (team,) = comparator.modules()
            assert isinstance(team, AgentTeam)
            assert [model.device.type for model in team.language_models()] == ["cpu", "meta"]
            assert team.concurrent

    def test_parameters_of_the_users_own(self) -> None:
        class WithOwn(MAGRPO):
            pass

        module = made(WithOwn)
        module.temperature = torch.nn.Parameter(torch.ones(1))
        module.adapter = torch.nn.Linear(2, 2)
        with self.placed(module):
            assert self.devices(module.adapter) == {"cpu"}
        assert module.temperature.device == CPU

    def test_nothing_runs_together_after_the_fit(self) -> None:
        module = made()
        fitted(module, True)
        assert not module.team.concurrent


class TestOverlap:
    """Passes of two models meet, counted and not timed."""

    @staticmethod
    def passes(expected: dict[str, int] | None = None) -> tuple[dict[str, list[int]], int]:
        """`[phase][agent]` forward passes of one batch, and how many agents compute at the same time.

        Args:
            expected: Per phase, how many of an agent's passes wait for those of the other: the fit is then one with
                the strategy, and waits for ever if they do not meet. None: without the strategy, and nothing waits.
        """
        module = made(reference_kl_coef=0.1, micro_batch_tokens=100)
        module.configure_model()
        counts: dict[str, list[int]] = {phase: [0, 0] for phase in ("rollout", "scores", "update")}
        meetings = {phase: Barrier(2, timeout=PATIENCE_SECONDS) for phase in counts}
        running, most, lock = [0], [0], Lock()
        for agent, model in enumerate(module.team.language_models()):

            def begin(*args: Any, agent: int = agent, body: Any = model) -> None:
                phase = "update" if torch.is_grad_enabled() else "scores" if body.training else "rollout"
                with lock:
                    running[0] += 1
                    most[0] = max(most[0], running[0])
                    counts[phase][agent] += 1
                if expected is not None and counts[phase][agent] <= expected[phase]:
                    meetings[phase].wait()

            def end(*args: Any) -> None:
                with lock:
                    running[0] -= 1

            model.causal.base_model.register_forward_pre_hook(begin)
            model.causal.base_model.register_forward_hook(end)
        fitted(module, expected is not None, max_epochs=1, limit_train_batches=1)
        return counts, most[0]

    def test_of_rollouts_scores_and_updates(self) -> None:
        alone, most_alone = self.passes()
        assert most_alone == 1
        assert all(min(counts) > 0 for counts in alone.values())
        # As long as both agents have passes, each pass of one meets a pass of the other.
        together, most = self.passes({phase: min(counts) for phase, counts in alone.items()})
        assert most == 2
        assert together == alone

    def test_modes_go_along(self) -> None:
        # Autocast, gradients and inference mode belong to a thread in torch.
        seen: set[tuple[str, bool, bool, torch.dtype | None]] = set()
        module = made()
        module.configure_model()

        def look(body: Any, *args: Any) -> None:
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            stage = str(module.trainer.state.stage.value)
            seen.add((stage, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype))

        for model in module.team.language_models():
            model.causal.base_model.register_forward_hook(look)
        strategy = AgentParallel(["cpu", "cpu"])
        trainer = make_trainer(strategy=strategy, precision="bf16-mixed", num_sanity_val_steps=0)
        data = TaskDataModule(ITEMS[:2], ITEMS[:1], batch_size=2)
        trainer.fit(module, data)
        half = torch.bfloat16
        assert {row for row in seen if row[0] == "train"} == {("train", grad, False, half) for grad in (False, True)}
        seen.clear()
        trainer.validate(module, data, verbose=False)
        assert seen == {("validate", False, True, half)}


class Plain(LightningModule):
    """No team."""


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"agent_devices": "cuda:0"}, r"agent_devices='cuda:0'\) is no list of devices. Give one per agent"),
            ({"agent_devices": []}, r"agent_devices=\[\]\) is no list"),
            ({"agent_devices": ["gpu0"]}, r"agent_devices='gpu0'\) names no device that computes. Use names such as"),
            ({"agent_devices": ["meta"]}, r"'meta'\) names no device that computes"),
            (
                {"agent_devices": ["cpu", "cuda:7"]},
                r"'cuda:7'\) names a device that is not there: .* has \d+ of the kind",
            ),
            ({"agent_devices": ["cpu"], "critic_device": "nowhere"}, r"critic_device='nowhere'\) names no device"),
            ({"agent_devices": ["cpu"], "reference_device": "cuda:9"}, r"reference_device='cuda:9'\) names a device"),
            ({"agent_devices": [3.5]}, r"agent_devices=3.5\) names no device"),
        ],
    )
    def test_of_devices(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            AgentParallel(**settings)

    @pytest.mark.parametrize(
        ("module", "num_devices", "message"),
        [
            (lambda: made(kind="shared"), 2, r"agents=SharedBase\(\.\.\.\) is one model for all. Use Separate"),
            (made, 1, r"names 1 devices for 2 agents. Give one per agent"),
            (made, 3, r"names 3 devices for 2 agents"),
            (Plain, 2, r"places the models of agents, and Plain has none"),
        ],
    )
    def test_of_modules_before_weights_load(self, module: Callable[[], Any], num_devices: int, message: str) -> None:
        refused = module()
        trainer = make_trainer(strategy=AgentParallel(["cpu"] * num_devices))
        with pytest.raises(ValueError, match=message):
            trainer.fit(refused, TaskDataModule(ITEMS))
        assert "team" not in dict(refused.named_children())

    @pytest.mark.parametrize(
        ("name", "algorithm", "settings", "message"),
        [
            ("reference_device", MAGRPO, {}, r"reference_device='cpu'\) has nothing to place: the reference is part"),
            ("reference_device", MAGRPO, {"kind": "separate", "reference_kl_coef": 0.1}, "has nothing to place"),
            ("critic_device", MAGRPO, {}, r"critic_device='cpu'\) has nothing to place: critics are part"),
            ("critic_device", IAC, {"critic": ValueHead()}, r"or use critic=ModelCritic\(model=\.\.\.\)"),
        ],
    )
    def test_of_what_is_not_there(self, name: str, algorithm: Any, settings: dict[str, Any], message: str) -> None:
        trainer = make_trainer(strategy=AgentParallel(["cpu", "cpu"], **{name: "cpu"}))
        with pytest.raises(ValueError, match=message):
            trainer.fit(made(algorithm, **settings), TaskDataModule(ITEMS))

    def test_of_autocast_on_two_kinds_of_devices(self) -> None:
        strategy = AgentParallel(["cpu", "cpu"])
        strategy.agent_devices = [CPU, torch.device("cuda", 0)]
        trainer = make_trainer(strategy=strategy, precision="bf16-mixed")
        with pytest.raises(ValueError, match=r"precision='bf16-mixed'\) works on one kind of device, .* cpu and cuda"):
            trainer.fit(made(), TaskDataModule(ITEMS))


class TestWriting:
    def test_from_yaml(self, tmp_path: Path) -> None:
        config = tmp_path / "config.yaml"
        config.write_text(
            """
model:
  class_path: MAGRPO
  init_args:
    agents: {class_path: comlrl_lightning.Separate, init_args: {models: [story-model, story-model]}}
    reward_func: comlrl_lightning.tasks.length_ratio.reward_func
data: {train_dataset: comlrl_lightning.tasks.length_ratio.train_items}
trainer:
  strategy: {class_path: comlrl_lightning.AgentParallel, init_args: {agent_devices: [cpu, cpu], critic_device: cpu}}
  logger: false
"""
        )
        strategy = CooperativeCLI(["--config", str(config)], run=False).trainer.strategy
        assert isinstance(strategy, AgentParallel)
        assert strategy.agent_devices == [CPU, CPU]
        assert strategy.critic_device == CPU

    def test_the_accelerator_follows_the_devices(self) -> None:
        trainer = make_trainer(strategy=AgentParallel(["cpu", "cpu"]), accelerator="auto", devices="auto")
        assert trainer.strategy.root_device == CPU
        assert trainer.num_devices == 1
