"""What every algorithm must do, over the registry: train, save, go on as if never stopped, load again."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comlrl_lightning.agents.settings import LoraSettings, SharedBase
from comlrl_lightning.algorithms import IAC, MAGRPO, MARLOO, POLICY_GRADIENT_ALGORITHMS, CooperativeModule
from comlrl_lightning.algorithms.checkpoint import check_settings
from comlrl_lightning.callbacks import BatchCheckpoint
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.evaluation import evaluate
from tests.algorithms.support import (
    ITEMS,
    LORA,
    Collected,
    MemoryLogger,
    echo,
    fit,
    make_module,
    make_trainer,
    tiny_agents,
    trained_a_little,
    uneven_reward,
    weights,
)
from tests.tiny_lm import save_tiny

TASKS = [{"prompt": text} for text in ("hi", "there", "you", "all", "!")]


def noisy_reward(*completions: list[str]) -> list[float]:
    """A reward that draws from all three global random states."""
    noise = random.random() + float(np.random.random()) + float(torch.rand(()))
    return [value + noise * place for place, value in enumerate(uneven_reward(*completions))]


def shout(item: dict[str, Any]) -> str:
    return f"{item['prompt']}!"


def shrinking(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)


def scramble(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Run:
    """Two epochs of five items, one per step, shuffled; two turns, a buffer of seven nodes, a schedule, log gates."""

    def __init__(self, algorithm: type[CooperativeModule], folder: Path, stream: bool = False) -> None:
        self.collected = Collected()
        self.logger = MemoryLogger()
        self.module = make_module(
            algorithm,
            reward_func=noisy_reward,
            num_turns=2,
            rollout_buffer_size=7,
            train_batch_size=4,
            clip_epsilon=0.2,
            reference_kl_coef=0.05,
            agent_learning_rate=[0.01, 0.003],
            lr_scheduler=shrinking,
            logging_steps=10,
        )
        self.checkpoints = BatchCheckpoint(1, keep=None, dirpath=folder)
        self.data = TaskDataModule(Stream() if stream else TASKS, shuffle=not stream, seed=3)

    def fit(self, resume: Path | None = None) -> Run:
        callbacks = [self.collected, *([] if resume else [self.checkpoints])]
        trainer = make_trainer(callbacks, max_epochs=2, logger=self.logger, enable_checkpointing=resume is None)
        trainer.fit(self.module, self.data, ckpt_path=resume)
        return self

    def logged(self, after: int = 0) -> list[dict[str, float]]:
        """Everything but wall times, logged above an env_step."""
        return [
            {name: value for name, value in metrics.items() if not name.startswith("time/")}
            for step, metrics in self.logger.rows
            if step is not None and step > after
        ]


class Stream:
    """Items without a length."""

    def __iter__(self) -> Any:
        return iter(TASKS)


def all_weights(module: CooperativeModule) -> dict[str, Tensor]:
    """Everything that is trained."""
    return {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def assert_goes_on(algorithm: type[CooperativeModule], folder: Path, stops: list[int], stream: bool = False) -> None:
    scramble(0)
    whole = Run(algorithm, folder, stream).fit()
    for stop in stops:
        scramble(stop)
        resumed = Run(algorithm, folder, stream).fit(folder / f"batch-{stop:06d}.ckpt")
        assert [one.nodes for one in resumed.collected.rollouts] == [
            one.nodes for one in whole.collected.rollouts[stop:]
        ]
        assert [one.items for one in resumed.collected.rollouts] == [
            one.items for one in whole.collected.rollouts[stop:]
        ]
        assert_same(all_weights(resumed.module), all_weights(whole.module))
        assert (
            resumed.module.env_step == whole.module.env_step == sum(one.num_scored for one in whole.collected.rollouts)
        )
        assert resumed.module.update_step == whole.module.update_step
        assert resumed.logged()
        assert resumed.logged() == whole.logged(sum(one.num_scored for one in whole.collected.rollouts[:stop]))


@pytest.mark.parametrize("algorithm", POLICY_GRADIENT_ALGORITHMS)
def test_a_stopped_run_goes_on_bit_for_bit(algorithm: type[CooperativeModule], tmp_path: Path) -> None:
    # After one item the buffer holds three or four of seven nodes.
    assert_goes_on(algorithm, tmp_path, [1])


def test_from_anywhere(tmp_path: Path) -> None:
    # Just after an update, with a half-full buffer, at the end of an epoch, in the second.
    assert_goes_on(MAGRPO, tmp_path, [3, 4, 5, 7])


def test_from_a_stream(tmp_path: Path) -> None:
    assert_goes_on(MARLOO, tmp_path, [2, 5, 6], stream=True)


@pytest.mark.parametrize("algorithm", POLICY_GRADIENT_ALGORITHMS)
def test_a_script_loads_it_again(algorithm: type[CooperativeModule], tmp_path: Path) -> None:
    agents = SharedBase(save_tiny(tmp_path / "base"), num_agents=2, lora=LORA)
    module = make_module(algorithm, agents, num_turns=2, agent_learning_rate=0.01)
    trainer = fit(module, ITEMS[:2], 1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found keys")
        loaded = algorithm.load_from_checkpoint(tmp_path / "run.ckpt")
    assert loaded.agents == agents
    assert loaded.hparams == module.hparams
    assert_same(all_weights(loaded), all_weights(module))
    data = TaskDataModule(ITEMS, eval_dataset=ITEMS)
    assert evaluate(loaded, data) == evaluate(module, data)


@pytest.mark.parametrize("algorithm", POLICY_GRADIENT_ALGORITHMS)
def test_hyperparameters_are_plain(algorithm: type[CooperativeModule]) -> None:
    module = make_module(algorithm, num_turns=2, formatters=[len_formatter, len_formatter], lr_scheduler=shrinking)
    assert is_plain(dict(module.hparams))
    assert module.hparams["reward_func"] == "tests.algorithms.support.uneven_reward"
    assert module.hparams["external_transition"] == "tests.algorithms.support.echo"
    assert module.hparams["num_turns"] == 2
    assert module.hparams["sampling"]["init_args"]["max_new_tokens"] == 4


def len_formatter(item: dict[str, Any]) -> str:
    return "!" * len(item["prompt"])


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


class TestCheckpoint:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        trainer = fit(make_module(MAGRPO, agent_learning_rate=0.01), ITEMS[:1], 1)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        return tmp_path / "run.ckpt"

    def resume(self, module: CooperativeModule, path: Path) -> Any:
        trainer = make_trainer(max_epochs=2)
        trainer.fit(module, TaskDataModule(ITEMS[:1]), ckpt_path=path)
        return trainer

    def test_it_holds_adapters_only(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)["state_dict"]
        assert state
        assert all("lora_" in name for name in state)

    @pytest.mark.parametrize(
        ("settings", "name"),
        [
            ({"num_generations": 3}, "num_generations=3 differs from the checkpoint's num_generations=2"),
            ({"discount": 0.5}, "discount=0.5 differs"),
            ({"seed": 9}, "seed=9 differs"),
            ({"joint_mode": "cross"}, "joint_mode='cross' differs"),
            ({"early_termination_threshold": 1.0}, "early_termination_threshold=1.0 differs"),
            ({"advantage_normalization": False}, "advantage_normalization=False differs"),
            ({"num_turns": 2, "external_transition": echo}, "num_turns=2 differs"),
            ({"reward_func": noisy_reward}, "reward_func='.*noisy_reward' differs from .*='.*uneven_reward'"),
            ({"formatters": shout}, "formatters='.*shout' differs from .* formatters=None"),
            ({"external_transition": echo}, "external_transition='.*echo' differs"),
        ],
    )
    def test_another_run_is_refused(self, path: Path, settings: dict[str, Any], name: str) -> None:
        with pytest.raises(ValueError, match=name):
            self.resume(make_module(MAGRPO, **settings), path)

    @pytest.mark.parametrize(
        ("algorithm", "threshold", "goes_on"), [(MAGRPO, None, True), (IAC, 1.5, True), (MAGRPO, 1.5, False)]
    )
    def test_stops_of_older_checkpoints(
        self, algorithm: type[CooperativeModule], threshold: float | None, goes_on: bool, tmp_path: Path
    ) -> None:
        # They knew no other rule than that of the group, which is about trees that stop.
        settings: dict[str, Any] = {"num_turns": 2, "early_termination_threshold": threshold}
        trainer = fit(make_module(algorithm, **settings), ITEMS[:1], 1)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
        del checkpoint["comlrl_lightning"]["settings"]["early_termination"]
        torch.save(checkpoint, tmp_path / "older.ckpt")
        if not goes_on:
            with pytest.raises(ValueError, match=r"early_termination='completion' differs from .*='group'"):
                self.resume(make_module(algorithm, **settings), tmp_path / "older.ckpt")
            settings["early_termination"] = "group"
        module = make_module(algorithm, **settings)
        self.resume(module, tmp_path / "older.ckpt")
        assert module.update_step > trainer.global_step > 0

    def test_functions_of_a_script_are_the_same_when_it_is_imported(self) -> None:
        check_settings({"f": "__main__.reward", "g": ["a.b"]}, {"f": "scripts.train.reward", "g": ["a.b"]})
        check_settings({"f": ["a.ask", "b.ask"]}, {"f": ["__main__.ask", "b.ask"]})
        check_settings({"f": {"func": "__main__.ask", "n": 1}}, {"f": {"func": "a.ask", "n": 1}})
        with pytest.raises(ValueError, match=r"^f\.n=2 differs"):
            check_settings({"f": {"func": "__main__.ask", "n": 1}}, {"f": {"func": "a.ask", "n": 2}})
        for saved, current in (("__main__.reward", "train.other"), ("a.reward", "b.reward"), ("a.ask", ["a.ask"])):
            with pytest.raises(ValueError, match=r"^f=.* differs"):
                check_settings({"f": saved}, {"f": current})

    def test_reference_adapters_come_back_though_their_folder_has_changed(self, tmp_path: Path) -> None:
        model, folder = save_tiny(tmp_path / "model"), tmp_path / "agents"
        base = SharedBase(model, num_agents=2, lora=LORA, dtype="float32")
        trained_a_little(make_module(MAGRPO, base)).save_agents(folder)

        def module() -> CooperativeModule:
            return make_module(MAGRPO, replace(base, adapters=str(folder)), reference_kl_coef=0.1)

        def references(one: CooperativeModule) -> dict[str, Tensor]:
            return {name: value for name, value in one.team.named_parameters() if "_reference" in name}

        first = module()
        fit(first, ITEMS[:1], 1).save_checkpoint(tmp_path / "run.ckpt")
        with pytest.warns(UserWarning, match="of an earlier save, which this one replaces"):
            trained_a_little(first, seed=5).save_agents(folder)
        again = module()
        self.resume(again, tmp_path / "run.ckpt")
        assert references(again)
        for name, value in references(again).items():
            torch.testing.assert_close(value, references(first)[name], rtol=0, atol=0)

    def test_another_algorithm_is_refused(self, path: Path) -> None:
        with pytest.raises(ValueError, match="algorithm='MARLOO' differs from the checkpoint's algorithm='MAGRPO'"):
            self.resume(make_module(MARLOO), path)

    def test_missing_weights_are_named(self, path: Path, tmp_path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        name = next(name for name in checkpoint["state_dict"] if "agent_1" in name)
        del checkpoint["state_dict"][name]
        torch.save(checkpoint, tmp_path / "poorer.ckpt")
        with pytest.raises(ValueError, match=r"lacks 1 of the weights .*agent_1"):
            MAGRPO.load_from_checkpoint(tmp_path / "poorer.ckpt", agents=tiny_agents())

    def test_another_number_of_agents_is_named(self, path: Path) -> None:
        with pytest.raises(ValueError, match="is of 2 language models, this module has 3"):
            MAGRPO.load_from_checkpoint(path, agents=tiny_agents(num_agents=3))

    def test_other_agents_are_refused_by_the_name_of_the_setting(self, path: Path) -> None:
        with pytest.raises(ValueError, match=r"^agents.num_agents=3 differs from the checkpoint's agents.num_agents=2"):
            self.resume(make_module(MAGRPO, tiny_agents(num_agents=3)), path)
        agents = replace(tiny_agents(), lora=LoraSettings(rank=3, alpha=4.0))
        with pytest.raises(ValueError, match=r"^agents.lora.rank=3 differs from the checkpoint's agents.lora.rank=2"):
            self.resume(make_module(MAGRPO, agents), path)

    def test_a_foreign_checkpoint_is_refused(self, path: Path, tmp_path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["comlrl_lightning"]
        torch.save(checkpoint, tmp_path / "foreign.ckpt")
        with pytest.raises(ValueError, match="was not saved by comlrl_lightning"):
            self.resume(make_module(MAGRPO), tmp_path / "foreign.ckpt")

    def test_a_new_learning_rate_wins(self, path: Path) -> None:
        trainer = self.resume(make_module(MAGRPO, agent_learning_rate=[0.02, 0.01]), path)
        assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.02, 0.01]

    def test_new_options_of_the_optimizer_win(self, path: Path) -> None:
        optimizer = partial(torch.optim.AdamW, weight_decay=0.5, betas=(0.8, 0.9))
        trainer = self.resume(make_module(MAGRPO, agent_learning_rate=0.01, optimizer=optimizer), path)
        for group in trainer.optimizers[0].param_groups:
            assert (group["weight_decay"], group["betas"], group["lr"]) == (0.5, (0.8, 0.9), 0.01)

    def test_another_optimizer_is_refused(self, path: Path) -> None:
        with pytest.raises(ValueError, match=r"^optimizer='torch.optim.sgd.SGD' differs from .*'torch.optim.adamw.Ad"):
            self.resume(make_module(MAGRPO, optimizer=torch.optim.SGD), path)

    def test_another_schedule_is_refused(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"^lr_scheduler={.*ExponentialLR.* differs from .*lr_scheduler=None"):
            self.resume(make_module(MAGRPO, lr_scheduler=shrinking), path)
        fit(make_module(MAGRPO, lr_scheduler=shrinking), ITEMS[:1], 1).save_checkpoint(tmp_path / "shrinking.ckpt")
        slower = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
        with pytest.raises(ValueError, match=r"^lr_scheduler.gamma=0.9 differs from .* lr_scheduler.gamma=0.7"):
            self.resume(make_module(MAGRPO, lr_scheduler=slower), tmp_path / "shrinking.ckpt")

    def test_a_new_fit_of_a_loaded_module_is_no_resume(self, path: Path) -> None:
        module = MAGRPO.load_from_checkpoint(
            path, agents=tiny_agents(), num_generations=3, agent_learning_rate=0.02, rollout_buffer_size=2
        )
        trainer = fit(module, ITEMS[:1], 1)
        assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.02, 0.02]

    def test_a_loaded_model_must_be_passed_again(self, path: Path) -> None:
        with pytest.raises(ValueError, match=r"agents .*Pass agents= "):
            MAGRPO.load_from_checkpoint(path)
        loaded = MAGRPO.load_from_checkpoint(path, agents=tiny_agents())
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.equal(value, state[f"team.{name}"]) for name, value in weights(loaded, 1).items())
