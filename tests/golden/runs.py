"""Short runs of every algorithm, and what is written down of them. Public names of the package are used alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from comlrl_lightning import (
    IAC,
    MAAC,
    MADPO,
    MAGRPO,
    MAREINFORCE,
    MARLHF,
    MARLOO,
    ActorCritic,
    AdapterCritic,
    AllHistory,
    CooperativeModule,
    HistoryPolicy,
    JointRewardModel,
    LambdaDecay,
    MAReMax,
    ModelCritic,
    Sampling,
    Separate,
    SharedBase,
    TaskDataModule,
    ValueHead,
    WeightedRewards,
)
from comlrl_lightning.callbacks import BatchCheckpoint, RolloutMetrics
from tests.golden.models import LORA, critic_model, separate, shared, tokenizer

ITEMS = [{"prompt": text} for text in ("hi", "there", "you all", "so long", "one more", "last")]
CHECKPOINTS = Path(__file__).parent / "checkpoints"


def reward(*completions: list[str]) -> list[float]:
    """Rewards without any pattern, multiples of 1/8, which depend on what every agent says."""
    return [
        sum((agent + 1) * sum(text.encode()) for agent, text in enumerate(joint)) % 23 / 8
        for joint in zip(*completions, strict=True)
    ]


def length_reward(*completions: list[str]) -> list[float]:
    """The number of letters of the first agent, up to 4, in quarters."""
    return [len(text) / 4 for text in completions[0]]


def row_reward(*completions: list[str]) -> list[list[float]]:
    """A reward per agent."""
    return [[sum(text.encode()) % 11 / 8 for text in joint] for joint in zip(*completions, strict=True)]


def ask(item: Mapping[str, Any]) -> str:
    """What the first agent reads."""
    return f"say {item['prompt']}"


def answer(item: Mapping[str, Any]) -> str:
    """What the second agent reads."""
    return f"{item['prompt']}!"


def echo(agent_completions: list[str]) -> list[str]:
    """Prompts of the next turn, which differ in length."""
    return [f"so {text}" for text in agent_completions]


def shrinking(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that shrinks at every optimizer step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)


@dataclass(frozen=True)
class Halves:
    """One model writes all answers: two agents get one half of the letters each, and nothing of a single letter."""

    def build_prompt(self, prompts: Sequence[Any]) -> Any:
        """The prompts one after the other."""
        return " : ".join(map(str, prompts))

    def split_completion(self, text: str, num_agents: int) -> list[str] | None:
        """Equal parts of the text."""
        size = len(text) // num_agents
        return [text[agent * size :][:size] for agent in range(num_agents)] if size else None


@dataclass(frozen=True)
class Case:
    """A run of a few optimizer steps."""

    algorithm: type[CooperativeModule]
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from `DEFAULTS`."""
    agents: Callable[[], SharedBase | Separate] = shared
    num_items: int = 3
    """Training steps per epoch, one item each."""
    num_epochs: int = 1
    """Of algorithms without rounds."""
    num_rounds: int = 1
    """Of algorithms with rounds."""
    evaluates: bool = False
    """Whether every epoch ends with an evaluation."""
    learned: bool = False
    """Whether a model gives rewards, which are then no exact numbers."""
    stop: int | None = None
    """Training steps before the checkpoint from which the run is gone on with, for those that keep one."""

    def module(self, seed: int) -> CooperativeModule:
        """A new module."""
        settings = {name: value() if isinstance(value, Fresh) else value for name, value in self.settings.items()}
        preferences = PREFERENCES if self.algorithm in (MADPO, MARLHF) else {}
        groups = {} if self.algorithm is MADPO else {"num_generations": 2}
        return self.algorithm(self.agents(), **{**DEFAULTS, **groups, **preferences, **settings}, seed=seed)

    def data(self) -> TaskDataModule:
        """A new data module."""
        items = ITEMS[: self.num_items]
        return TaskDataModule(items, eval_dataset=items[:2] if self.evaluates else None)


@dataclass(frozen=True)
class Fresh:
    """A setting that is made anew for every module, as modules take loaded models over."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        return self.make()


DEFAULTS: dict[str, Any] = {
    "reward_func": reward,
    "formatters": [ask, answer],
    "sampling": Sampling(max_new_tokens=4),
    "agent_learning_rate": [0.05, 0.02],
}
PREFERENCES: dict[str, Any] = {"num_candidates": 4}
TWO_TURNS: dict[str, Any] = {"num_turns": 2, "external_transition": echo}
OLD: dict[str, Any] = {"loss_aggregation": "sum"}
"""What the checkpoints of the former version were trained with."""
REWARD_MODEL = JointRewardModel(AdapterCritic(LORA, hidden_size=8), learning_rate=0.05, held_out_share=0.4)
CRITIC = AdapterCritic(LORA)
PARTS = WeightedRewards({"any": reward, "length": length_reward}, {"any": 1.0, "length": 0.5})


def critic(**settings: Any) -> dict[str, Any]:
    """Settings of algorithms with critics."""
    return {"critic": CRITIC, "critic_learning_rate": 0.05, **settings}


def model_critic() -> ModelCritic:
    """A critic on a language model of its own, all of whose weights are trained."""
    return ModelCritic(critic_model(), tokenizer=tokenizer())


CASES: dict[str, Case] = {
    "mareinforce": Case(MAREINFORCE),
    "magrpo": Case(MAGRPO, {"num_generations": 3}, evaluates=True),
    "marloo": Case(MARLOO, {"num_generations": 3}),
    "maremax": Case(MAReMax, {"num_generations": 3}),
    "iac_v": Case(IAC, critic()),
    "iac_q": Case(IAC, critic(critic_type="q")),
    "maac_v": Case(MAAC, critic()),
    "maac_q": Case(MAAC, critic(critic_type="q")),
    "madpo": Case(MADPO),
    "marlhf": Case(MARLHF, {"reward_model": REWARD_MODEL}, learned=True),
    "mareinforce_batch": Case(
        MAREINFORCE, {"advantage_normalization": "batch", "discount": 0.5, **TWO_TURNS}, num_items=4
    ),
    "magrpo_cross": Case(MAGRPO, {"joint_mode": "cross"}),
    "magrpo_two_turns": Case(
        MAGRPO, {"rollout_buffer_size": 5, "logging_steps": 7, **OLD, **TWO_TURNS}, num_items=4, num_epochs=2, stop=3
    ),
    "magrpo_kl": Case(MAGRPO, {"reference_kl_coef": 0.2}, evaluates=True),
    "magrpo_clip": Case(
        MAGRPO, {"clip_epsilon": 0.1, "clip_epsilon_high": 0.2, "num_inner_epochs": 2, "rollout_buffer_size": 2}
    ),
    "magrpo_minibatches": Case(
        MAGRPO,
        {"clip_epsilon": 0.1, "num_inner_epochs": 2, "rollout_buffer_size": 3, "train_batch_size": 2},
    ),
    "magrpo_sequence": Case(
        MAGRPO,
        {"importance_level": "sequence", "clip_epsilon": 0.2, "num_inner_epochs": 2, "entropy_coef": 0.1},
    ),
    "magrpo_separate_full": Case(MAGRPO, {"agent_learning_rate": 0.01}, separate),
    "magrpo_separate_kl": Case(MAGRPO, {"agent_learning_rate": 0.01, "reference_kl_coef": 0.2}, separate),
    "magrpo_centralized": Case(MAGRPO, {"collaboration": Halves(), "agent_learning_rate": 0.05, "num_generations": 3}),
    "magrpo_three_agents": Case(
        MAGRPO, {"agent_learning_rate": 0.05, "formatters": None, "micro_batch_tokens": 8}, lambda: shared(3)
    ),
    "magrpo_stops_early": Case(MAGRPO, {"early_termination_threshold": 1.5, **TWO_TURNS}),
    "magrpo_sampling": Case(
        MAGRPO,
        {
            "sampling": Sampling(max_new_tokens=6, min_new_tokens=2, temperature=0.8, top_k=12),
            "advantage_normalization": False,
            "lr_scheduler": shrinking,
            "max_grad_norm": None,
        },
    ),
    "magrpo_parts": Case(MAGRPO, {"reward_func": PARTS, "reward_processor": abs}),
    "iac_two_turns": Case(
        IAC,
        critic(gae_lambda=0.5, value_clip_range=0.2, discount=0.9, rollout_buffer_size=5, **OLD, **TWO_TURNS),
        num_items=5,
        stop=2,
    ),
    "iac_head": Case(IAC, {"critic": ValueHead(), "critic_learning_rate": 0.05, "value_loss_coef": 0.3}),
    "iac_per_agent": Case(IAC, critic(reward_func=row_reward, per_agent_rewards=True)),
    "maac_per_agent": Case(MAAC, critic(reward_func=row_reward, per_agent_rewards=True, **TWO_TURNS)),
    "maac_model": Case(MAAC, {"critic": Fresh(model_critic), "critic_learning_rate": 0.01}, separate),
    "madpo_rounds": Case(
        MADPO,
        {
            "reference_free": False,
            "length_normalized": True,
            "beta": 0.5,
            "replay": AllHistory(),
            "train_batch_size": 2,
        },
        num_rounds=2,
        stop=7,
    ),
    "madpo_comparator": Case(
        MADPO,
        {"comparator": HistoryPolicy(1), "num_candidates": 3, "replay": LambdaDecay(0.5)},
        num_items=2,
        num_rounds=2,
    ),
    "marlhf_rounds": Case(
        MARLHF,
        {
            "reward_model": REWARD_MODEL,
            "policy": ActorCritic("MAAC", critic=CRITIC, critic_learning_rate=0.05),
            "preference_scoring": "reward_model",
        },
        num_items=2,
        num_rounds=2,
        learned=True,
    ),
}
"""Every algorithm, then what may be set; of each the name of its file."""


class Rows(Logger):
    """Keeps what is logged, without wall times and without what is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "golden"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        kept = {
            name: float(value)
            for name, value in sorted(metrics.items())
            if name != "epoch" and not name.startswith("time/") and not name.endswith("sampler_gap")
        }
        if kept:
            self.rows.append(kept)


class Recorder(Callback):
    """Keeps joint completions with their rewards, and sums over the trained weights of each parameter group."""

    def __init__(self) -> None:
        self.steps: list[list[list[Any]]] = []
        """Rows of every training step."""
        self.evaluations: list[list[Any]] = []
        """Rows of all evaluations."""
        self.weights: dict[str, dict[str, list[float]]] = {}
        """Sum and sum of squares by group: at the start, at the end, and of the difference."""
        self._start: dict[str, list[Tensor]] = {}
        self._evaluating = False

    def metrics(self, records: Sequence[Any]) -> dict[str, float]:
        """Write the records of a training step or of an evaluated item down."""
        rows = self.evaluations if self._evaluating else self.steps[-1]
        rows += joint_rows(records)
        return {}

    def on_train_batch_start(self, *args: Any) -> None:
        self.steps.append([])

    def on_validation_start(self, *args: Any) -> None:
        self._evaluating = True

    def on_validation_end(self, *args: Any) -> None:
        self._evaluating = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = parameter_groups(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, end in parameter_groups(trainer).items():
            start = self._start[name]
            moved = [new - old for new, old in zip(end, start, strict=True)]
            self.weights[name] = {"start": sums(start), "end": sums(end), "moved": sums(moved)}


def joint_rows(records: Sequence[Any]) -> list[list[Any]]:
    """One row per joint completion: index of the item, turn, path, answers, their numbers of tokens, reward."""
    rows: dict[tuple[Any, ...], list[Any]] = {}
    for record in records:
        about = record.metadata
        key = about["item_index"], about["turn"], ".".join(map(str, about["path"])), about["joint_index"]
        row = rows.setdefault(key, [*key[:3], [], [], float(about["reward"])])
        row[3].append(record.completion)
        row[4].append(about["num_tokens"])
    return list(rows.values())


def parameter_groups(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Copies of all trained weights by the name of their group."""
    (optimizer,) = trainer.optimizers
    return {group["name"]: [one.detach().clone() for one in group["params"]] for group in optimizer.param_groups}


def sums(tensors: Sequence[Tensor]) -> list[float]:
    """Sum and sum of squares over all numbers of some tensors."""
    return [float(sum(one.sum() for one in tensors)), float(sum(one.square().sum() for one in tensors))]


def checkpoint_of(name: str) -> Path:
    """The checkpoint that was kept of a run."""
    return CHECKPOINTS / f"{name}.ckpt"


def run(
    case: Case, seed: int, ckpt_path: Path | None = None, checkpoints: Path | None = None
) -> tuple[dict[str, Any], Trainer]:
    """Train and write down what came of it.

    Args:
        case: What to train.
        seed: Of the module.
        ckpt_path: Checkpoint to go on from.
        checkpoints: Folder for a checkpoint after every training step.

    Returns:
        The record, and the trainer.
    """
    module, recorder, logger = case.module(seed), Recorder(), Rows()
    rounds = getattr(module, "epochs_per_round", None)
    callbacks = [recorder, RolloutMetrics(recorder.metrics)]
    if checkpoints is not None:
        callbacks.append(BatchCheckpoint(1, keep=None, dirpath=checkpoints))
    trainer = Trainer(
        max_epochs=case.num_epochs if rounds is None else case.num_rounds * rounds,
        accelerator="cpu",
        devices=1,
        logger=logger,
        callbacks=callbacks,
        enable_checkpointing=checkpoints is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, case.data(), ckpt_path=ckpt_path)
    record = {
        "seed": seed,
        "steps": recorder.steps,
        "evaluations": recorder.evaluations,
        "logs": logger.rows,
        "weights": recorder.weights,
    }
    return record, trainer
