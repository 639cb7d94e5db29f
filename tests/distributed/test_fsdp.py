"""Frozen weights in shards: two ranks do what one process does, however unevenly they generate and learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from comlrl_lightning import ShardedParallel
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Sampling, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms import IAC, MAAC, MADPO, MAGRPO, MARLHF, CooperativeModule
from comlrl_lightning.callbacks import BatchCheckpoint
from comlrl_lightning.critics.settings import ModelCritic, ValueHead
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.evaluation import evaluate
from comlrl_lightning.preferences.comparators import FixedModel, HistoryPolicy
from comlrl_lightning.strategies.sharding import shard_frozen
from comlrl_lightning.utilities.distributed import meet_by, sum_over_ranks
from tests.algorithms.support import LORA, make_module, make_trainer, tiny_agents, tiny_model
from tests.distributed.launch import run_ranks
from tests.distributed.support import Fit, Run, all_tokens, assert_in_step, fit_on_rank, tasks
from tests.tiny_lm import tiny_llama, tiny_tokenizer


@dataclass
class Shards:
    """What one rank holds of the frozen weights."""

    names: list[str]
    num_here: int
    num_in_all: int
    num_changed: int
    is_trained: bool


class LookAtShards(Callback):
    """Counts the weights in shards, and those of them that training has changed."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.shards: Shards | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = {name: one.full_tensor() for name, one in sharded(pl_module).items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = sharded(pl_module)
        self.shards = Shards(
            list(now),
            sum(one.to_local().numel() for one in now.values()),
            sum(one.numel() for one in now.values()),
            sum(not torch.equal(one.full_tensor(), self.before[name]) for name, one in now.items()),
            any(one.requires_grad for one in now.values()),
        )


class EachPromptAnew(Callback):
    """Reads a prompt for each of its completions, as models in shards do: then results agree to the last bit."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for model in cast("CooperativeModule", pl_module).team.language_models():
            model.reads_prompts_once = False


def on_two_ranks(run: Run, **more: Any) -> list[Fit]:
    return run.on(2, **{**more, "callbacks": [*more.get("callbacks", ()), EachPromptAnew()]})


def sharded(module: torch.nn.Module) -> dict[str, DTensor]:
    return {name: one for name, one in module.named_parameters() if isinstance(one, DTensor)}


def fit_sharded(run: Run, more: dict[str, Any]) -> tuple[Fit, Shards]:
    """Fit as one of two ranks with the frozen weights in shards."""
    look = LookAtShards()
    callbacks = [look, *more.get("callbacks", ())]
    result = fit_on_rank(run, 2, {"strategy": ShardedParallel(), **more, "callbacks": callbacks})
    assert look.shards is not None
    return result, look.shards


def two_ranks(run: Run, **more: Any) -> tuple[list[Fit], list[Shards]]:
    fits, shards = zip(*run_ranks(fit_sharded, 2, run, more), strict=True)
    assert_in_step(fits)
    return list(fits), list(shards)


def assert_close(ours: dict[str, float], theirs: dict[str, float]) -> None:
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


UNEVEN: dict[str, Any] = {"num_turns": 2, "early_termination_threshold": 1.0, "agent_learning_rate": 0.01}
"""Some items end after a turn, each completion has a length of its own."""
PLAIN: dict[str, Any] = {"optimizer": torch.optim.SGD, "max_grad_norm": None}
NUM_FROZEN = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32)
"""In two layers of the tiny Llama: queries and output, keys and values, the three parts after them, two norms."""
CASES: dict[str, tuple[type[CooperativeModule], dict[str, Any], int]] = {
    "magrpo": (MAGRPO, {**UNEVEN, "num_generations": 2, "reference_kl_coef": 0.1, "entropy_coef": 0.01}, 1),
    "iac": (IAC, {**UNEVEN, "num_generations": 2}, 1),
    "madpo": (MADPO, {"num_candidates": 3, "reference_free": False, "agent_learning_rate": 0.01}, 2),
    "maac": (MAAC, {**UNEVEN, "num_generations": 2, "critic_type": "q", "critic": "model"}, 1),
    "full critic": (MAAC, {**UNEVEN, "num_generations": 2, "critic": "full"}, 1),
    "marlhf": (MARLHF, {"num_candidates": 3, "policy": "MAAC", "num_generations": 1}, 3),
    "separate": (MAGRPO, {**UNEVEN, "num_generations": 2, "agents": "separate", "reference_kl_coef": 0.1}, 1),
    "history": (MADPO, {"num_candidates": 3, "comparator": HistoryPolicy(1), "agent_learning_rate": 0.01}, 4),
    "fixed": (MADPO, {"num_candidates": 3, "comparator": "fixed", "agent_learning_rate": 0.01}, 2),
}


def make_run(case: str, **more: Any) -> Run:
    """Three items on two ranks: two steps per epoch, the second of which gives nothing to rank 1."""
    algorithm, settings, max_epochs = CASES[case]
    settings = {**PLAIN, **settings, **more}
    if settings.get("agents") == "separate":
        settings["agents"] = tiny_agents("separate", dtype=torch.float32)
    if settings.get("critic") in ("model", "full"):
        lora = LORA if settings["critic"] == "model" else None
        settings["critic"] = ModelCritic(tiny_model(1, torch.float32), lora=lora, tokenizer=tiny_tokenizer())
    if settings.get("comparator") == "fixed":
        settings["comparator"] = FixedModel(tiny_agents("separate", dtype=torch.float32))
    return Run(algorithm, settings, {"train_dataset": tasks(3), "batch_size": 2}, {"max_epochs": max_epochs})


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in list(CASES)[:4] else pytest.mark.slow) for case in CASES]
)
def test_the_same_as_one_process(case: str) -> None:
    run = make_run(case)
    fits, shards = two_ranks(run)
    (whole,) = run_ranks(fit_on_rank, 1, run, 1, {})
    assert all_tokens(fits) == all_tokens([whole])
    assert fits[0].update_step == whole.update_step >= 2
    for ours, theirs in zip(fits[0].weights, whole.weights, strict=True):
        assert_close(ours, theirs)
    assert fits[0].weights[0] != fits[0].weights[-1]
    # The ranks did not do the same number of passes: rank 1 had no item in the last step of an epoch.
    assert [fit.steps[1].num_nodes > 0 for fit in fits] == [True, False]
    for one in shards:
        assert all(".layers." in name or ".h." in name for name in one.names)
        assert not any("lora_" in name for name in one.names)
        assert one.num_here * 2 == one.num_in_all >= NUM_FROZEN
        assert one.num_changed == 0
        assert not one.is_trained


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mini-batches": ({"critic": ValueHead(), "num_inner_epochs": 2, "clip_epsilon": 0.2, "train_batch_size": 4}, {}),
    "transformers": ({"sampling": Sampling(max_new_tokens=4, backend="transformers")}, {}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "checkpointing": ({"agents": {"gradient_checkpointing": True}}, {}),
    "one at a time": ({"agents": {"lora": LoraSettings(rank=2, modules_to_save=["lm_head"], use_dora=True)}}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_as_ddp(variant: str) -> None:
    """What depends on the number of ranks, but not on where the frozen weights are."""
    settings, trainer = VARIANTS[variant]
    settings = {"micro_batch_tokens": 64, **settings}
    if "agents" in settings:
        model = {"model": tiny_model(0, torch.float32), "tokenizer": tiny_tokenizer(), "num_agents": 2, "lora": LORA}
        settings["agents"] = SharedBase(**{**model, **settings["agents"]})
    run = make_run("magrpo" if variant == "one at a time" else "iac", **settings)
    fits, _ = two_ranks(run, **trainer)
    whole = on_two_ranks(run, **trainer)
    for ours, theirs in zip(fits, whole, strict=True):
        assert [step.tokens for step in ours.steps] == [step.tokens for step in theirs.steps]
        assert_close(ours.weights[-1], theirs.weights[-1])
        for (_, row), (_, other) in zip(ours.metrics, theirs.metrics, strict=True):
            assert_close(row, other)


def saved(folder: Path) -> dict[str, Any]:
    return {"callbacks": [BatchCheckpoint(1, keep=None, dirpath=folder)], "enable_checkpointing": True}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sharded", "sharded"),
        pytest.param("ddp", "sharded", marks=pytest.mark.slow),
        pytest.param("sharded", "ddp", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_hold_adapters_and_go_on(before: str, after: str, tmp_path: Path) -> None:
    run = make_run("magrpo", optimizer=torch.optim.AdamW)

    def ranks(kind: str, **more: Any) -> list[Fit]:
        return two_ranks(run, **more)[0] if kind == "sharded" else on_two_ranks(run, **more)

    whole = ranks(before, **saved(tmp_path))
    assert whole[0].update_step == 2
    path = tmp_path / "batch-000001.ckpt"
    weights = torch.load(path, weights_only=True)["state_dict"]
    # 2 layers, 7 linear ones in each, 2 agents, 2 factors.
    assert len(weights) == 2 * 7 * 2 * 2
    assert all(".agent_" in name and "lora_" in name for name in weights)
    assert not any(isinstance(value, DTensor) for value in weights.values())
    resumed = ranks(after, ckpt_path=path)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours.steps == theirs.steps[1:]
        assert ours.weights == theirs.weights[1:]
        assert (ours.env_step, ours.update_step) == (theirs.env_step, theirs.update_step)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    # When the first batch is over the buffer is not full, and the optimizer has no state yet.
    run = make_run("magrpo", optimizer=torch.optim.AdamW, rollout_buffer_size=20)
    assert two_ranks(run, **saved(tmp_path))[0][0].weights == two_ranks(run)[0][0].weights


def used_otherwise(world_size: int, folder: Path) -> list[Any]:
    """Validate, test and predict before a fit, `evaluate` and save the agents after it."""
    module = make_run("maac").module()
    data = TaskDataModule(tasks(2), tasks(3), batch_size=2 // world_size)
    trainers: list[Trainer] = []

    def trainer() -> Trainer:
        settings: dict[str, Any] = {} if world_size == 1 else {"strategy": ShardedParallel(), "devices": 2}
        trainers.append(make_trainer(**settings))
        return trainers[-1]

    results: list[Any] = [
        dict(trainer().validate(module, data, verbose=False)[0]),
        dict(trainer().test(module, data, verbose=False)[0]),
    ]
    predictions = trainer().predict(module, data)
    assert predictions is not None
    trainer().fit(module, data)
    results.append(evaluate(module, data))
    module.save_agents(folder / str(world_size))
    if world_size == 2:
        dist.barrier()
        # Over gloo Lightning leaves it off in any case; over NCCL FSDP2 could not train after it.
        first, second, third, fourth = trainers
        assert not first.validate_loop.inference_mode
        assert not second.test_loop.inference_mode
        assert not third.predict_loop.inference_mode
        assert not fourth.fit_loop.epoch_loop.val_loop.inference_mode
    texts = [row["completions"] for batch in predictions for row in batch]
    return [*results, texts, {name: one for name, one in module.named_parameters() if one.requires_grad}]


def test_evaluation_prediction_and_folders(tmp_path: Path) -> None:
    (whole,) = run_ranks(used_otherwise, 1, 1, tmp_path)
    parts = run_ranks(used_otherwise, 2, 2, tmp_path)
    for part in parts:
        for ours, theirs in zip(part[:3], whole[:3], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    # Items 0 and 2 are rank 0's, item 1 rank 1's; each has two turns at most.
    assert sorted(map(str, parts[0][3] + parts[1][3])) == sorted(map(str, whole[3]))
    assert parts[1][3]
    folders = [sorted(path.name for path in (tmp_path / name).iterdir() if path.is_dir()) for name in "12"]
    assert folders == [["agent_0", "agent_1", "critic"]] * 2
    agents = SharedBase(tiny_llama(), 2, tokenizer=tiny_tokenizer(), adapters=str(tmp_path / "2"))
    team = build_team(agents)
    for agent in range(2):
        for name, parameter in team.agent_parameters(agent).items():
            torch.testing.assert_close(parameter.detach(), parts[0][4][f"team.{name}"])


def make_team(kind: str) -> AgentTeam:
    return build_team(tiny_agents("separate" if kind == "separate" else "shared", dtype=torch.float32))


def gradients_of_passes(orders: list[list[list[int]]], shards: bool) -> list[Tensor | None]:
    """Gradients of the first factors after some losses; each is of several passes, by the number of the model.

    Args:
        orders: `[ranks][losses]` models; a negative number, from -1 on, is a pass without gradients.
        shards: Whether the models are in shards.
    """
    team = make_team("separate")
    dist.init_process_group("gloo")
    here = dist.get_rank()
    lockstep = shard_frozen(team, init_device_mesh("cpu", (dist.get_world_size(),))) if shards else None
    meet_by(None if lockstep is None else lockstep.meet)
    models = team.language_models()
    for model in models:
        for parameter in model.adapter_parameters():
            parameter.data = torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter)
    for loss_number, order in enumerate(orders[here]):
        losses = []
        for position, number in enumerate(order):
            model = models[number if number >= 0 else -1 - number]
            ids = torch.arange(3 + here + position + loss_number)[None] % 200
            with torch.set_grad_enabled(number >= 0), model.acting_as(model.agents, [1]):
                states = model.hidden_states(ids, torch.arange(ids.shape[1])[None])
            if number >= 0:
                losses.append(states.square().sum())
        loss = torch.stack(losses).sum()
        (loss if lockstep is None else lockstep.with_idle(loss)).backward()  # type: ignore[no-untyped-call]
    assert sum_over_ranks(1.0) == dist.get_world_size()
    assert bool(sharded(team)) is shards
    first = [next(one for one in model.adapter_parameters() if one.requires_grad) for model in models]
    return [None if one.grad is None else one.grad for one in first]


ORDERS = [
    # Rank 1 does nothing at all.
    [[[0], [0, 1]], []],
    # Another model first, another number of passes per loss, and of losses; some passes without gradients.
    [[[0, 1], [1]], [[-1, 1, -2, 0, 0], [0], [1, -1, 1]]],
]


@pytest.mark.parametrize("orders", ORDERS)
def test_passes_of_ranks_that_want_others(orders: list[list[list[int]]]) -> None:
    for ours, theirs in zip(
        run_ranks(gradients_of_passes, 2, orders, True),
        run_ranks(gradients_of_passes, 2, orders, False),
        strict=True,
    ):
        for gradient, other in zip(ours, theirs, strict=True):
            assert (gradient is None) is (other is None)
            if gradient is not None and other is not None:
                torch.testing.assert_close(gradient, other)


def refused(module: CooperativeModule, strategies: list[Any]) -> str:
    """What the last of some fits in a row says."""
    data = TaskDataModule(tasks(2), batch_size=1)
    *former, last = (make_trainer(strategy=strategy, devices=2) for strategy in strategies)
    for trainer in former:
        trainer.fit(module, data)
    with pytest.raises(ValueError, match="Use") as caught:
        last.fit(module, data)
    return str(caught.value)


def nameless_layers() -> PreTrainedModel:
    model = tiny_model(0, torch.float32)
    assert isinstance(model, PreTrainedModel)
    model._no_split_modules = None
    return model


@pytest.mark.parametrize(
    ("agents", "strategies", "said"),
    [
        (
            tiny_agents("full", dtype=torch.float32),
            [ShardedParallel()],
            "agent_0 trains all weights of its model, and ShardedParallel() shards only frozen ones. Use"
            " lora=LoraSettings() in agents=, or strategy='ddp'.",
        ),
        (
            tiny_agents(dtype=torch.float32),
            [ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)],
            "Trainer(strategy=ModelParallelStrategy(...)) leaves it to the module what is sharded, and its checkpoints"
            " would gather the frozen weights. Use strategy=ShardedParallel(), which shards these alone.",
        ),
        (
            tiny_agents(dtype=torch.float32),
            [ShardedParallel(), "ddp"],
            "Trainer(strategy=DDPStrategy) cannot go on with this module, whose frozen weights are in shards. Use"
            " strategy=ShardedParallel(), or load a checkpoint into a new module.",
        ),
        (
            SharedBase(nameless_layers(), 2, lora=LORA, tokenizer=tiny_tokenizer()),
            [ShardedParallel()],
            "LlamaForCausalLM does not say what its decoder layers are, so that ShardedParallel() cannot shard it. Use"
            " strategy='ddp'.",
        ),
    ],
)
def test_what_is_refused(agents: Any, strategies: list[Any], said: str) -> None:
    assert run_ranks(refused, 2, make_module(MAGRPO, agents), strategies) == [said] * 2


def test_sixteen_bits_need_a_scaler() -> None:
    def said() -> str:
        trainer = make_trainer(strategy=ShardedParallel(), devices=2, precision="16-true")
        module = make_module(MAGRPO, tiny_agents(dtype=torch.float32))
        with pytest.raises(ValueError, match="gradient scaler") as caught:
            trainer.fit(module, TaskDataModule(tasks(2)))
        return str(caught.value)

    assert "Trainer(precision='16-true')" in run_ranks(said, 2)[1]


@pytest.mark.parametrize("timeout_seconds", [0, -1.0, True, "long", float("inf"), float("nan")])
def test_timeout(timeout_seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"ShardedParallel\(timeout_seconds=.*Use a number above 0"):
        ShardedParallel(timeout_seconds=timeout_seconds)
