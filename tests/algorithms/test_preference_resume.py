"""Stopped rounds of preferences go on as if they had not been: pairs, rewards, weights and logs, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms import MADPO, MARLHF, PreferenceModule
from comlrl_lightning.algorithms.methods import ActorCritic
from comlrl_lightning.callbacks import BatchCheckpoint
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.preferences.comparators import HistoryPolicy
from comlrl_lightning.preferences.pairs import PreferencePair, Round
from comlrl_lightning.preferences.replay import AllHistory, LambdaDecay
from comlrl_lightning.preferences.rounds import Phase
from comlrl_lightning.types import Node
from tests.algorithms.support import MemoryLogger, make_trainer, tiny_agents, uneven_reward

TASKS = [{"prompt": text} for text in ("hi", "there", "you", "all", "!")]
NUM_STEPS = len(TASKS)
"""Training steps of every epoch: one item each."""
RewardFunc = Callable[..., list[float]]


def noisy_reward(*completions: list[str]) -> list[float]:
    """A reward that draws from all three global random states."""
    noise = random.random() + float(np.random.random()) + float(torch.rand(()))
    return [value + noise * place for place, value in enumerate(uneven_reward(*completions))]


class Failing:
    """The same reward, which once raises in place of its n-th call, from 1; never with 0."""

    def __init__(self, call: int) -> None:
        self.calls_left = call

    def __call__(self, *completions: list[str]) -> list[float]:
        self.calls_left -= 1
        if not self.calls_left:
            raise RuntimeError("no answer from the judge")
        return noisy_reward(*completions)


def shrinking(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def scramble(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def direct(reward_func: RewardFunc) -> PreferenceModule:
    """Pairs against the policy of the round before, drawn from all rounds, in mini-batches of two."""
    return MADPO(
        tiny_agents(),
        reward_func=reward_func,
        num_candidates=3,
        comparator=HistoryPolicy(1),
        replay=LambdaDecay(0.5),
        learning_epochs=2,
        train_batch_size=2,
        sampling=Sampling(max_new_tokens=4),
        agent_learning_rate=[0.01, 0.003],
        lr_scheduler=shrinking,
        logging_steps=2,
        seed=1,
    )


def indirect(reward_func: RewardFunc) -> PreferenceModule:
    """A reward model, which ranks the later candidates too, and a buffer of several steps."""
    return MARLHF(
        tiny_agents(),
        reward_func=reward_func,
        num_candidates=3,
        replay=AllHistory(),
        preference_scoring="reward_model",
        reward_model=JointRewardModel(num_epochs=2, batch_size=2, learning_rate=0.01, held_out_share=0.2),
        policy=ActorCritic("MAAC", critic_learning_rate=0.01),
        reference_kl_coef=0.05,
        num_generations=2,
        rollout_buffer_size=5,
        train_batch_size=2,
        clip_epsilon=0.2,
        sampling=Sampling(max_new_tokens=4),
        agent_learning_rate=0.01,
        lr_scheduler=shrinking,
        logging_steps=5,
        seed=1,
    )


MAKERS = {"MADPO": (direct, 3), "MARLHF": (indirect, 2)}
"""How each module is made, and its number of rounds."""
KEPT = {"MADPO": {"lora_A", "lora_B"}, "MARLHF": {"lora_A", "lora_B", "output"}}
"""Kinds of weights that a checkpoint holds: adapters, and heads."""


class Stream:
    """The items without a length."""

    def __iter__(self) -> Any:
        return iter(TASKS)


class Seen(Callback):
    """What every training step of every phase left behind."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.env_steps: list[int] = []
        self.nodes: list[tuple[Node, ...] | None] = []
        self.rounds: list[Round | None] = []
        self.pairs: list[tuple[PreferencePair, ...]] = []
        self.rewards: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, PreferenceModule)
        self.phases.append(pl_module.schedule.phase(trainer.current_epoch))
        self.env_steps.append(pl_module.env_step)
        self.nodes.append(None if pl_module.rollouts is None else pl_module.rollouts.nodes)
        self.rounds.append(pl_module.last_round)
        self.pairs.append(pl_module.rounds.pairs)
        self.rewards.append((pl_module.rounds.offset, pl_module.rounds.scale))


class Run:
    """A module, its data and what was seen of it."""

    def __init__(self, name: str, folder: Path, stream: bool = False, reward_func: RewardFunc = noisy_reward) -> None:
        make, num_rounds = MAKERS[name]
        self.folder = folder
        self.module = make(reward_func)
        self.max_epochs = num_rounds * self.module.epochs_per_round
        self.seen = Seen()
        self.logger = MemoryLogger()
        self.data = TaskDataModule(Stream() if stream else TASKS, shuffle=not stream, seed=3)

    def fit(self, resume: Path | None = None, callbacks: tuple[Callback, ...] = ()) -> Run:
        trainer = make_trainer(
            [self.seen, *callbacks],
            max_epochs=self.max_epochs,
            logger=self.logger,
            enable_checkpointing=bool(callbacks),
        )
        trainer.fit(self.module, self.data, ckpt_path=resume)
        return self

    def saving(self) -> Run:
        """Fit with a checkpoint after every training step."""
        return self.fit(callbacks=(BatchCheckpoint(1, keep=None, dirpath=self.folder),))

    def logged(self, after: int = 0) -> list[dict[str, float]]:
        """Everything but wall times, logged when so many steps had scored or updated."""
        return [
            {name: value for name, value in metrics.items() if not name.startswith("time/")}
            for _, metrics in self.logger.rows
            if metrics["env_step"] + metrics["update_step"] > after
        ]


def trained(module: PreferenceModule) -> dict[str, Tensor]:
    """Agents, critics and the reward model."""
    return {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}


def assert_same_end(resumed: Run, whole: Run, start: int) -> None:
    """A run that began at a training step of another one ends as that one does."""
    ours, theirs = resumed.seen, whole.seen
    assert ours.phases == theirs.phases[start:]
    assert ours.nodes == theirs.nodes[start:]
    assert ours.rounds == theirs.rounds[start:]
    assert ours.pairs == theirs.pairs[start:]
    assert ours.rewards == theirs.rewards[start:]
    assert ours.env_steps == theirs.env_steps[start:]
    own, other = trained(resumed.module), trained(whole.module)
    assert list(own) == list(other)
    assert all(torch.equal(value, other[name]) for name, value in own.items())
    assert resumed.module.counters() == whole.module.counters()
    rows = resumed.logged()
    assert rows == whole.logged()[len(whole.logged()) - len(rows) :]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Whole runs with all of their checkpoints, each made once."""

    @cache
    def run(name: str) -> Run:
        scramble(0)
        return Run(name, tmp_path_factory.mktemp(name)).saving()

    return run


def assert_goes_on(name: str, whole: Run, stops: list[int], stream: bool = False) -> None:
    assert len(whole.seen.phases) == whole.max_epochs * NUM_STEPS
    for stop in stops:
        scramble(stop)
        path = whole.folder / f"batch-{stop:06d}.ckpt"
        resumed = Run(name, whole.folder, stream).fit(path)
        assert_same_end(resumed, whole, stop)
        state = torch.load(path, weights_only=True)
        counts = state["comlrl_lightning"]["env_step"] + state["comlrl_lightning"]["update_step"]
        # What had been scored and done at the stop was logged by then or is logged later, once.
        assert resumed.logged() == whole.logged(after=counts)
        assert {kind for key in state["state_dict"] for kind in key.split(".")} >= KEPT[name]
        assert all(KEPT[name] & set(key.split(".")) for key in state["state_dict"])


# MADPO: five steps each collect, learn, learn; the third round, with a former policy and old pairs, is 31 to 45.
# MARLHF: five each collect, fit, fit, learn; the second round is 21 to 40.
@pytest.mark.parametrize(
    ("name", "stops"), [("MADPO", [30, 33, 35, 38, 40, 43]), ("MARLHF", [8, 20, 23, 25, 28, 30, 33, 35, 38])]
)
def test_from_the_middle_and_the_end_of_every_phase(
    name: str, stops: list[int], unbroken: Callable[[str], Run]
) -> None:
    assert_goes_on(name, unbroken(name), stops)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_epochs"), [("MADPO", 9), ("MARLHF", 8)])
def test_from_every_step(name: str, num_epochs: int, unbroken: Callable[[str], Run]) -> None:
    assert_goes_on(name, unbroken(name), list(range(1, num_epochs * NUM_STEPS)))


@pytest.mark.parametrize(("name", "stops"), [("MADPO", [32, 35, 40]), ("MARLHF", [20, 25, 29, 35])])
def test_from_a_stream(name: str, stops: list[int], tmp_path: Path) -> None:
    scramble(0)
    assert_goes_on(name, Run(name, tmp_path, stream=True).saving(), stops, stream=True)


# MADPO scores an item's candidates, then the comparator's: call 14 is item 2 of round 2, its comparator, and call 20
# the last one of that collection. MARLHF's second round is scored by the reward model: its calls are in the first.
@pytest.mark.parametrize(
    ("name", "call", "start"),
    [("MADPO", 3, 1), ("MADPO", 14, 16), ("MADPO", 20, 19), ("MARLHF", 1, 0), ("MARLHF", 5, 4)],
)
def test_a_collection_that_fails_loses_nothing(
    name: str, call: int, start: int, tmp_path: Path, unbroken: Callable[[str], Run]
) -> None:
    scramble(0)
    failed = Run(name, tmp_path, reward_func=Failing(call))
    with pytest.raises(RuntimeError, match="no answer from the judge"):
        failed.fit(callbacks=(OnExceptionCheckpoint(tmp_path),))
    assert len(failed.seen.phases) == start
    scramble(call)
    resumed = Run(name, tmp_path, reward_func=Failing(0)).fit(tmp_path / "on_exception.ckpt")
    assert_same_end(resumed, unbroken(name), start)


def test_the_same_objects_go_on_after_a_failure(tmp_path: Path, unbroken: Callable[[str], Run]) -> None:
    # Whoever catches the error and fits again has the module, its comparator and its half-collected round at hand.
    scramble(0)
    run = Run("MADPO", tmp_path, reward_func=Failing(14))
    with pytest.raises(RuntimeError, match="no answer from the judge"):
        run.fit(callbacks=(OnExceptionCheckpoint(tmp_path),))
    scramble(7)
    run.fit(tmp_path / "on_exception.ckpt")
    assert_same_end(run, unbroken("MADPO"), 0)


def test_what_a_round_needs_is_in_the_checkpoint(unbroken: Callable[[str], Run]) -> None:
    # After step 17: two items of the second round, the pairs of the first, and the weights that both rounds began with.
    run = unbroken("MADPO")
    state = torch.load(run.folder / "batch-000017.ckpt", weights_only=True)["comlrl_lightning"]["own"]
    (own,) = state["rounds"]["ranks"]
    assert {pair["item_index"] for pair in own["collected"]} <= set(range(NUM_STEPS))
    assert own["num_rewards"] == 2 * 3
    assert [one["number"] for one in state["rounds"]["kept"]] == [0]
    assert list(state["comparator"]["weights"]) == [0, 1]
    first, second = state["comparator"]["weights"].values()
    assert any(not torch.equal(value, second[name]) for name, value in first.items())
    assert run.seen.rounds[16] == Round.from_state(state["rounds"]["kept"][0])


def test_the_runs_above_test_something(unbroken: Callable[[str], Run]) -> None:
    # Each round has pairs, updates follow, and pairs of former rounds are learned from again.
    for name in MAKERS:
        run = unbroken(name)
        rounds = list(dict.fromkeys(one.number for one in run.seen.rounds if one is not None))
        assert rounds == list(range(MAKERS[name][1]))
        assert all(len(one.pairs) > 3 for one in run.seen.rounds if one is not None)
        assert run.module.update_step > 10
        last = run.module.last_round
        assert last is not None
        assert set(run.module.rounds.pairs) - set(last.pairs)
    # MARLHF scales its scores after the last epoch of fitting in each of two rounds; before, they are what they are.
    assert len(set(run.seen.rewards)) == 1 + 2
