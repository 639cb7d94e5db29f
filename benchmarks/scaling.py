"""Operations and bytes of one MAGRPO step, counted and foretold, as agents, samples, tokens and the model grow.

    python -m benchmarks.scaling

counts with torch's own counter what sampling and the update of random Llama models multiply, and what an update keeps
for its backward pass, and prints both beside the formulas of ``SCALING.md``, changing one quantity at a time. It takes
less than a minute and no network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks._report import table
from comlrl_lightning import LoraSettings, Sampling, SharedBase
from comlrl_lightning.agents.decoding.native import Row, generate
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.log_probs import PaddedTokens
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.assets import story_model_path
from comlrl_lightning.types import Completion


@dataclass(frozen=True)
class Step:
    """What is sampled and learned from: K completions of C tokens for each of some nodes, by every agent."""

    num_agents: int = 2
    num_nodes: int = 2
    num_generations: int = 4
    num_prompt_tokens: int = 24
    num_tokens: int = 24
    hidden_size: int = 96
    num_layers: int = 4
    vocabulary: int = 1024
    rank: int = 8

    @property
    def intermediate_size(self) -> int:
        """Width inside of the feed-forward layers."""
        return 3 * self.hidden_size

    @property
    def kv_size(self) -> int:
        """Width of keys, and of values: every second head has its own."""
        return self.hidden_size // 2

    @property
    def num_weights(self) -> int:
        """W, in the matrices of all layers."""
        h, i, kv = self.hidden_size, self.intermediate_size, self.kv_size
        return self.num_layers * (2 * h * h + 2 * h * kv + 3 * h * i)

    @property
    def num_adapter_weights(self) -> int:
        """A, in the adapter of one agent."""
        h, i, kv = self.hidden_size, self.intermediate_size, self.kv_size
        return self.num_layers * self.rank * (2 * (h + h) + 2 * (h + kv) + 3 * (h + i))

    @property
    def reads_prompts_once(self) -> bool:
        """Whether the update reads a prompt once for its K completions."""
        apart, shared = self._tokens_read()
        return shared <= 0.75 * apart

    def _tokens_read(self) -> tuple[int, int]:
        prompt, completion, k = self.num_prompt_tokens, self.num_tokens, self.num_generations
        return k * (prompt + completion), prompt + k * completion

    def sampling_flops(self) -> float:
        """Multiplications and additions of sampling."""
        prompt, k, later = self.num_prompt_tokens, self.num_generations, self.num_tokens - 1
        per_token = 2 * (self.num_weights + self.num_adapter_weights)
        head = 2 * self.hidden_size * self.vocabulary
        seen = prompt**2 + k * sum(prompt + token for token in range(1, later + 1))
        of_group = per_token * (prompt + k * later) + head * (1 + k * later)
        return self.num_agents * self.num_nodes * (of_group + self._attention(seen))

    def update_flops(self) -> float:
        """Multiplications and additions of the forward and the backward pass of one update."""
        prompt, k, later = self.num_prompt_tokens, self.num_generations, self.num_tokens - 1
        read = prompt + k * later if self.reads_prompts_once else k * (prompt + later)
        seen = k * (prompt + later) ** 2
        if self.reads_prompts_once:
            seen = prompt**2 + k * later * (prompt + later)
        # Nothing below the first layer is trained: its queries, keys and values pass no gradient on.
        h, kv = self.hidden_size, self.kv_size
        spared = 2 * read * (h * h + 2 * h * kv + 3 * self.rank * h)
        passes = read * (4 * self.num_weights + 6 * self.num_adapter_weights) - spared
        head = 4 * h * self.vocabulary * k * self.num_tokens
        return self.num_agents * self.num_nodes * (passes + head + 3 * self._attention(seen))

    def _attention(self, num_pairs: int) -> int:
        """Of scores and weighted sums for so many pairs of a query and a key, in every layer."""
        return 4 * self.num_layers * self.hidden_size * num_pairs


def build(step: Step) -> AgentTeam:
    """Random agents; attention is written out, since torch's counter does not know the fused one of CPUs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=step.hidden_size,
        intermediate_size=step.intermediate_size,
        num_hidden_layers=step.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=step.vocabulary,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    lora = LoraSettings(rank=step.rank)
    tokenizer = AutoTokenizer.from_pretrained(story_model_path())
    return build_team(SharedBase(LlamaForCausalLM(config), step.num_agents, lora=lora, tokenizer=tokenizer))


def count(step: Step) -> tuple[float, float, float]:
    """Operations of sampling, operations of the update, and bytes that it keeps per token read."""
    team = build(step)
    (model,) = team.language_models()
    prompts = [
        (agent, tuple(1 + (node + token) % 500 for token in range(step.num_prompt_tokens)))
        for agent in range(step.num_agents)
        for node in range(step.num_nodes)
    ]
    rows = [Row(agent, prompt, (sample,)) for agent, prompt in prompts for sample in range(step.num_generations)]
    sampling = Sampling(max_new_tokens=step.num_tokens, min_new_tokens=step.num_tokens)
    with FlopCounterMode(display=False) as counter, team.rollout_mode():
        sampled = generate(model, rows, sampling)
    in_sampling = counter.get_total_flops()
    completions = [
        Completion(row.agent, "", row.prompt_ids, one.token_ids, one.log_probs, "", truncated=True)
        for row, one in zip(rows, sampled, strict=True)
    ]
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        if not isinstance(saved, torch.nn.Parameter) and saved.grad_fn is not None:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            loss = team.log_probs(completions, temperature=1.0).log_probs.sum()
        loss.backward()  # type: ignore[no-untyped-call]
    read = PaddedTokens(completions, reads_prompts_once=model.reads_prompts_once).total
    return in_sampling, counter.get_total_flops(), sum(kept.values()) / read


def steps() -> list[tuple[str, Step]]:
    """The plain step, and one for each quantity that is changed."""
    plain = Step()
    changes = {
        "num_agents": (4, 8),
        "num_generations": (2, 8),
        "num_nodes": (5,),
        "num_prompt_tokens": (96,),
        "num_tokens": (96,),
        "hidden_size": (192,),
        "num_layers": (8,),
        "vocabulary": (4096,),
        "rank": (32,),
    }
    changed = [
        (f"{name} = {value}", replace(plain, **{name: value})) for name, values in changes.items() for value in values
    ]
    return [("plain", plain), *changed]


def main() -> None:
    """Count every step and print the table."""
    lines = []
    for name, step in steps():
        in_sampling, in_update, kept = count(step)
        lines.append(
            [
                name,
                f"{in_sampling / 1e9:.3f}",
                f"{in_sampling / step.sampling_flops():.3f}",
                f"{in_update / 1e9:.3f}",
                f"{in_update / step.update_flops():.3f}",
                f"{kept / 1e3 / step.num_layers:.1f}",
            ]
        )
    columns = ["step", "sampling, GFLOP", "of the formula", "update, GFLOP", "of the formula", "kept, kB/token/layer"]
    print(table(columns, lines))


if __name__ == "__main__":
    main()
