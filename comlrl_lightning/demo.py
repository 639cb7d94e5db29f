"""The demonstration behind ``make demo``: two agents learn the length-ratio task, offline, in about a minute."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import LinearLR

from comlrl_lightning import MAGRPO, Sampling, SharedBase, TaskDataModule, evaluate
from comlrl_lightning.assets import story_model_path
from comlrl_lightning.callbacks import (
    CompletionsTable,
    EvalInterval,
    EvalMetrics,
    JSONExport,
    RewardCurve,
    RolloutProgress,
    SaveAgents,
)
from comlrl_lightning.files import Place, claim
from comlrl_lightning.reports import say, sturdy_output
from comlrl_lightning.tasks import length_ratio
from comlrl_lightning.utilities.quiet import quiet_libraries


def demo(model: str | None, seed: int, out: Path, max_epochs: int = 6) -> dict[str, float]:
    """Train two agents and write everything under `out`.

    Args:
        model: Hub name or local folder; None takes the story model of the package.
        seed: Seed of the run.
        out: Folder for metrics, completions, reward curve and agents.
        max_epochs: Passes over the task items.

    Returns:
        Mean reward of the evaluation `before` and `after`, of the `first_quarter` and `last_quarter` of training.
    """
    seed_everything(seed, verbose=False)
    items = length_ratio.open_train_items() if model else length_ratio.train_items()
    data = TaskDataModule(
        train_dataset=items,
        eval_dataset=length_ratio.open_eval_items() if model else length_ratio.eval_items(),
        batch_size=4,
        eval_batch_size=8,
        shuffle=True,
        seed=seed,
    )
    module = MAGRPO(
        agents=SharedBase(model or str(story_model_path()), num_agents=2),
        formatters=[length_ratio.brief_formatter, length_ratio.detailed_formatter],
        reward_func=length_ratio.reward_func,
        num_generations=8,
        joint_mode="cross",
        sampling=Sampling(max_new_tokens=128),
        advantage_normalization=False,
        agent_learning_rate=3e-4 if model else 4e-3,
        lr_scheduler=partial(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=len(items) // 4 * max_epochs),
        seed=seed,
    )
    curve, export = RewardCurve(out / "reward-curve.png"), JSONExport(out / "metrics.json")
    trainer = Trainer(
        max_epochs=max_epochs,
        accelerator="auto" if model else "cpu",
        logger=CSVLogger(out, name="logs", version=""),
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[
            EvalInterval(len(items)),
            EvalMetrics(length_ratio.eval_logger, length_ratio.eval_aggregator),
            export,
            CompletionsTable(out / "completions.jsonl", num_on_screen=2),
            RolloutProgress(),
            SaveAgents(out / "agents"),
            curve,
        ],
    )
    trainer.fit(module, data)
    metrics = evaluate(module, data)
    rewards = [reward for _, reward in curve.training_points[1]]
    quarter = max(len(rewards) // 4, 1)
    before = curve.evaluation_points[1][0][1]
    summary = {
        "before": before,
        "after": metrics["eval/final_reward_mean"],
        "first_quarter": fmean(rewards[:quarter]),
        "last_quarter": fmean(rewards[-quarter:]),
    }
    export.path.write_text(json.dumps({**summary, **metrics}, indent=2) + "\n")
    return summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run the demonstration and say what came out.

    Args:
        arguments: In place of those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m comlrl_lightning.demo", description=__doc__)
    parser.add_argument("--model", help="hub name or local folder in place of the story model of the package")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the task items")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where everything is written")
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs {options.epochs} trains nothing. Use at least 1.")
    quiet_libraries()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    with sturdy_output():
        _run(options.model, options.seed, options.out, options.epochs)


def _run(model: str | None, seed: int, out: Path, max_epochs: int) -> None:
    """Run the demonstration, in place of a former one, and say what came out."""
    place, _lock = claim(Place.of(out), "The demonstration")  # held while this runs
    if place.exists():
        say(f"{place} holds a former run, which this one replaces\n")
        warnings.filterwarnings("ignore", message=".* of another run, which this one")
    rewards = demo(model, seed, place.local, max_epochs)
    say(
        f"mean reward on held-out tasks: {rewards['before']:.3f} before, {rewards['after']:.3f} after training\n"
        f"mean reward in training: {rewards['first_quarter']:.3f} in the first quarter, "
        f"{rewards['last_quarter']:.3f} in the last\n"
        f"written to {place}: metrics.json, metrics.jsonl, completions.jsonl, reward-curve.png, agents/, logs/\n"
    )


if __name__ == "__main__":
    main()
