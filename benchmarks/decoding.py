"""Ways to decode a batch of one language model: this package's loop beside those of transformers.

    python -m benchmarks.decoding --model SmolLM2-135M-Instruct

samples the same number of tokens by transformers' `generate` with a growing cache, with a static one, and with a static
one behind `torch.compile`, all without adapters, and by this package with two agents' adapters. Each way runs once to
warm up, which is where compilation happens, and then three times; the fastest is printed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._model import DEFAULT_MODEL, model_folder
from benchmarks._report import table
from comlrl_lightning import Sampling, SharedBase
from comlrl_lightning.agents.decoding.native import Row, generate
from comlrl_lightning.agents.loading import build_team

PROMPT = "Write a story about a fox and a bear in the winter woods."


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the first run, and of the fastest of three more."""
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds[0], min(seconds[1:])


def ways(folder: str, num_rows: int, num_tokens: int) -> dict[str, Callable[[], Any]]:
    """What to time, by name; the model is compiled when the last of transformers' ways runs.

    Args:
        folder: Of the model.
        num_rows: Completions in the batch, an even number.
        num_tokens: Of each of them.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    inputs = tokenizer([PROMPT] * num_rows, return_tensors="pt")
    settings = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": True, "top_k": 0, "top_p": 1.0}
    theirs = partial(model.generate, **inputs, **settings, pad_token_id=0)

    def compiled() -> Any:
        if not hasattr(model.forward, "_torchdynamo_orig_callable"):
            model.forward = torch.compile(model.forward, dynamic=False)
        return theirs(cache_implementation="static")

    team = build_team(SharedBase(folder, num_agents=2, dtype="bfloat16"))
    (own,) = team.language_models()
    prompt = tuple(inputs.input_ids[0].tolist())
    rows = [Row(agent, prompt, (agent, sample)) for agent in range(2) for sample in range(num_rows // 2)]
    sampling = Sampling(max_new_tokens=num_tokens, min_new_tokens=num_tokens)

    def ours() -> Any:
        with team.rollout_mode():
            return generate(own, rows, sampling)

    return {
        "transformers, growing cache": theirs,
        "transformers, static cache": partial(theirs, cache_implementation="static", disable_compile=True),
        "transformers, static cache, compiled": compiled,
        "this package, two adapters": ours,
    }


def main() -> None:
    """Read the command line, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or folder")
    parser.add_argument("--rows", type=int, default=32, help="completions in the batch")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    options = parser.parse_args()
    lines = []
    with torch.no_grad():
        for name, run in ways(str(model_folder(options.model)), options.rows, options.tokens).items():
            first, best = timed(run)
            lines.append([name, f"{first:.1f}", f"{best:.2f}", f"{options.rows * options.tokens / best:.0f}"])
    print(table(["way", "first run, s", "best of three, s", "tokens/s"], lines))


if __name__ == "__main__":
    main()
