"""Learn the length-ratio task with a real language model: does the reward rise, and how fast?

    python -m benchmarks.learning --model SmolLM2-135M-Instruct --items 60 --seeds 0 1 2 --out runs/learning

writes one ``seed_N.csv`` (a row per joint completion: env_step and reward) per seed and ``curves.png``.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning import LoraSettings, Sampling, SharedBase, TaskDataModule
from comlrl_lightning.algorithms import POLICY_GRADIENT_ALGORITHMS
from comlrl_lightning.tasks import length_ratio
from comlrl_lightning.types import RolloutSource

mpl.use("Agg")


class RewardLog(Callback):
    """Keeps the reward of every joint completion, in order."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, RolloutSource)
        assert pl_module.rollouts is not None
        self.rewards += [reward for node in pl_module.rollouts.nodes for reward in node.rewards]


def learn(
    algorithm: str, model: str, seed: int, num_items: int, learning_rate: float, batch_size: int, out: Path
) -> list[float]:
    """Train on `num_items` task items and return the reward of every joint completion."""
    items = [
        {"prompt": prompt, "target_min": 2.0, "target_max": 3.0}
        for prompt in (length_ratio.OPEN_PROMPTS * (num_items // len(length_ratio.OPEN_PROMPTS) + 1))[:num_items]
    ]
    (chosen,) = (one for one in POLICY_GRADIENT_ALGORITHMS if one.__name__ == algorithm)
    module = chosen(
        agents=SharedBase(model, num_agents=2, lora=LoraSettings()),
        formatters=[length_ratio.brief_formatter, length_ratio.detailed_formatter],
        reward_func=length_ratio.reward_func,
        num_generations=4,
        sampling=Sampling(max_new_tokens=64),
        agent_learning_rate=learning_rate,
        seed=seed,
    )
    log = RewardLog()
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[log])
    started = time.perf_counter()
    trainer.fit(module, TaskDataModule(items, batch_size=batch_size))
    rewards = log.rewards
    seconds = time.perf_counter() - started
    print(
        f"{algorithm}, seed {seed}: {len(rewards)} joint completions in {seconds:.0f} s, mean reward of the first 64"
        f" {fmean(rewards[:64]):.3f}, of the last 64 {fmean(rewards[-64:]):.3f}"
    )
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"seed_{seed}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("env_step", "reward"), *enumerate(rewards, start=1)])
    return rewards


def draw(curves: dict[int, list[float]], path: Path, window: int = 16) -> None:
    """Draw the running mean of the rewards of every seed."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for seed, rewards in curves.items():
        means = [fmean(rewards[max(0, end - window) : end]) for end in range(1, len(rewards) + 1)]
        axes.plot(range(1, len(rewards) + 1), means, label=f"seed {seed}")
    axes.set(xlabel="joint completions scored (env_step)", ylabel=f"reward, running mean over {window}", ylim=(0, 1))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Read the command line and run every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [algorithm.__name__ for algorithm in POLICY_GRADIENT_ALGORITHMS]
    parser.add_argument("--algorithm", choices=names, default="MAGRPO")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--items", type=int, default=60, help="task items per seed")
    parser.add_argument("--batch-size", type=int, default=1, help="task items per update")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    options = parser.parse_args()
    settings = (options.items, options.learning_rate, options.batch_size, options.out)
    curves = {seed: learn(options.algorithm, options.model, seed, *settings) for seed in options.seeds}
    draw(curves, options.out / "curves.png")


if __name__ == "__main__":
    main()
