"""Joint completions to read, critics of them, and what their values should be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from comlrl_lightning.agents.settings import LoraSettings
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.critics import CriticTeam, CriticType, Head
from comlrl_lightning.critics.loading import build_critics
from comlrl_lightning.critics.settings import AdapterCritic, CriticSettings, ValueHead
from comlrl_lightning.types import Completion, Prompt

JointCompletion = tuple[Completion, ...]
OWN = (ValueHead(), AdapterCritic(LoraSettings(rank=4)))
"""Critics that read the agents' own tokens."""


def said(team: AgentTeam, agent: int, prompt: Prompt, text: str) -> Completion:
    """A completion that the agent's own tokenizer encodes."""
    tokens = team.speaker(agent).tokenizer(text, add_special_tokens=False).input_ids
    return Completion(agent, prompt, team.encode(agent, prompt), tuple(tokens), (), text, False)


def samples(team: AgentTeam, *words: Sequence[tuple[Prompt, str]]) -> list[JointCompletion]:
    return [tuple(said(team, agent, *pair) for agent, pair in enumerate(sample)) for sample in words]


def talk(team: AgentTeam) -> list[JointCompletion]:
    """Three joint completions of two agents, of different lengths."""
    return samples(
        team,
        [("hello", "yes"), ("a longer prompt", "no")],
        [("hello", "certainly"), ("b", "yes")],
        [("x", "y"), ("b", "")],
    )


def critics_of(
    settings: CriticSettings,
    team: AgentTeam,
    *,
    centralized: bool = False,
    critic_type: CriticType = "v",
    num_outputs: int = 1,
    noise: float = 0.3,
    name: str = "critic",
    freeze_backbone: bool = False,
) -> CriticTeam:
    """Critics that have moved away from their start."""
    critics = build_critics(
        settings,
        team,
        centralized=centralized,
        critic_type=critic_type,
        num_outputs=num_outputs,
        name=name,
        freeze_backbone=freeze_backbone,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for group in critics.parameter_groups().values():
            for parameter in group.values():
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return critics


def head_of(critics: CriticTeam, index: int = 0) -> Head:
    head = critics.heads[index]
    assert isinstance(head, Head)
    return head


def state_at(causal: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """`[1, H]` hidden state of the last of the tokens, read alone."""
    states: Tensor = causal.base_model(input_ids=torch.tensor([list(ids)])).last_hidden_state[:, -1]
    return states


def own_ids(completion: Completion, critic_type: CriticType) -> tuple[int, ...]:
    return completion.prompt_ids + (completion.token_ids if critic_type == "q" else ())


def expected_own_values(critics: CriticTeam, team: AgentTeam, critic_type: CriticType, adapter: str) -> Tensor:
    """`[3, 2]` values of `talk`, one row and critic at a time."""
    rows = []
    for sample in talk(team):
        row = []
        for agent, completion in enumerate(sample):
            model = team.speaker(agent)
            assert model.adapters is not None
            with model.adapters.acting(f"{adapter}_{agent}"):
                row.append(head_of(critics, agent)(state_at(model.causal, own_ids(completion, critic_type)))[0, 0])
        rows.append(torch.stack(row))
    return torch.stack(rows)
