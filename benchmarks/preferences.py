"""Learn the length-ratio task from preferences with a real language model: mean reward before and after.

    python -m benchmarks.preferences --algorithm MADPO --model SmolLM2-135M-Instruct --seeds 0 1

evaluates 64 sampled joint completions, trains, evaluates again, and prints what each training step logged on the way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from comlrl_lightning import MADPO, MARLHF, JointRewardModel, Sampling, SharedBase, TaskDataModule, evaluate
from comlrl_lightning.algorithms import PreferenceModule
from comlrl_lightning.tasks import length_ratio

SHOWN = ("turn_1/reward_mean", "preference/accuracy", "reward_model/accuracy", "reward_model/held_out_accuracy")


class Print(Logger):
    """Prints the most telling metrics of each training step."""

    name = "print"
    version = 0

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        shown = {name: round(value, 3) for name, value in metrics.items() if name.endswith(SHOWN)}
        if shown:
            print(f"  env_step {step}: {shown}", flush=True)


def items(count: int) -> list[dict[str, Any]]:
    """Task items over the same few prompts."""
    prompts = (length_ratio.OPEN_PROMPTS[index % len(length_ratio.OPEN_PROMPTS)] for index in range(count))
    return [{"prompt": prompt, "target_min": 2.0, "target_max": 3.0} for prompt in prompts]


def build(algorithm: str, model: str, seed: int, learning_epochs: int) -> PreferenceModule:
    """The algorithm with settings that suit a model of this size."""
    common: dict[str, Any] = {
        "agents": SharedBase(model, num_agents=2),
        "formatters": [length_ratio.brief_formatter, length_ratio.detailed_formatter],
        "reward_func": length_ratio.reward_func,
        "num_candidates": 8,
        "sampling": Sampling(max_new_tokens=64),
        "learning_epochs": learning_epochs,
        "seed": seed,
    }
    if algorithm == "MADPO":
        return MADPO(**common, reference_free=False, train_batch_size=4, agent_learning_rate=1e-4)
    reward_model = JointRewardModel(learning_rate=1e-3, num_epochs=2, batch_size=4)
    return MARLHF(**common, reward_model=reward_model, num_generations=4, agent_learning_rate=3e-4)


def main() -> None:
    """Read the command line and run every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["MADPO", "MARLHF"], default="MADPO")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--learning-epochs", type=int, default=1, help="per round")
    parser.add_argument("--items", type=int, default=40, help="task items per round")
    parser.add_argument("--batch-size", type=int, default=8, help="task items per training step")
    options = parser.parse_args()
    for seed in options.seeds:
        module = build(options.algorithm, options.model, seed, options.learning_epochs)
        data = TaskDataModule(items(options.items), items(64), batch_size=options.batch_size, eval_batch_size=16)
        started = time.perf_counter()
        before = evaluate(module, data)["eval/final_reward_mean"]
        trainer = Trainer(
            max_epochs=options.rounds * module.epochs_per_round,
            accelerator="cpu",
            logger=Print(),
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, data)
        after = evaluate(module, data)["eval/final_reward_mean"]
        seconds = time.perf_counter() - started
        print(f"{options.algorithm}, seed {seed}: {before:.3f} -> {after:.3f} in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
