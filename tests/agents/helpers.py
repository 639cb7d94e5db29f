"""Small teams and requests that the tests of the agents share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.language_model import LanguageModel
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.types import Completion
from tests.tiny_lm import tiny_gemma, tiny_gpt2, tiny_llama, tiny_qwen2, tiny_qwen3, tiny_tokenizer

ARCHITECTURES: list[Callable[[], PreTrainedModel]] = [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_gpt2, tiny_gemma]


def shared_team(
    model: PreTrainedModel | None = None, num_agents: int = 2, noise: float = 0.1, **settings: Any
) -> AgentTeam:
    """A team on one tiny base whose adapters have moved away from their start, each in its own direction."""
    settings.setdefault("tokenizer", tiny_tokenizer(chat=True))
    team = build_team(SharedBase(model if model is not None else tiny_llama(), num_agents, **settings))
    stir(team, noise)
    return team


def stir(team: AgentTeam, noise: float = 0.1, seed: int = 0) -> None:
    """Add noise to every trained parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(team).values():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))


def trained(team: AgentTeam) -> dict[str, nn.Parameter]:
    """All trained parameters by name."""
    return {name: parameter for name, parameter in team.named_parameters() if parameter.requires_grad}


def model_of(team: AgentTeam, index: int = 0) -> LanguageModel:
    """One of the team's language models."""
    model = team.models[index]
    assert isinstance(model, LanguageModel)
    return model


def requests(prompts: Sequence[str], agents: Sequence[int] = (0, 1), samples: int = 2) -> list[GenerationRequest]:
    """Each agent answers each prompt; the key of a sample depends on nothing but prompt, agent and sample."""
    return [
        GenerationRequest(agent, prompt, tuple((7, *prompt.encode(), agent, sample) for sample in range(samples)))
        for prompt in prompts
        for agent in agents
    ]


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    """All completions in one list."""
    return [completion for group in groups for completion in group]


def completion(agent: int, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Completion:
    """A completion that was never sampled."""
    return Completion(agent, "", tuple(prompt_ids), tuple(token_ids), (), "", False)


def written(seed: int, agents: Sequence[int]) -> list[Completion]:
    """Random completions of different lengths, one per entry of `agents`."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        ids: list[int] = torch.randint(0, 256, (length,), generator=generator).tolist()
        return ids

    return [completion(agent, tokens(2, 9), tokens(1, 8)) for agent in agents]


def row_log_probs(causal: PreTrainedModel, row: Completion, temperature: float) -> Tensor:
    """`[C]` log-probabilities of one completion by the model's own forward pass, unpadded."""
    ids = torch.tensor([row.prompt_ids + row.token_ids])
    logits = causal(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1]
    scores: Tensor = (logits / temperature).log_softmax(-1)
    return scores.gather(1, torch.tensor(row.token_ids).unsqueeze(1)).squeeze(1)


@contextmanager
def counting(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the `input_ids` of every forward pass of a module."""
    calls: list[tuple[int, ...]] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        hook.remove()
