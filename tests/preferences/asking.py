"""Prompts for comparators, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.preferences.comparators import (
    APIComparator,
    Comparator,
)
from comlrl_lightning.types import Completion, Prompt
from tests.agents.helpers import flat
from tests.tiny_lm import tiny_tokenizer

EOS = 257
SAMPLING = Sampling(max_new_tokens=8)
KEY = "sk-very-secret-0123456789"


def asked(prompts: Sequence[Prompt] = ("ab", "c"), agents: Sequence[int] = (0, 1), samples: int = 2) -> Any:
    """Requests in the order of a collector: node by node, agent by agent."""
    return [
        GenerationRequest(agent, prompt, tuple((7, place, agent, sample) for sample in range(samples)))
        for place, prompt in enumerate(prompts)
        for agent in agents
    ]


def said(comparator: Comparator, team: AgentTeam, sampling: Sampling = SAMPLING) -> list[Completion]:
    return flat(comparator.sampler(team).generate(asked(), sampling))


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    return tuple((tokenizer or tiny_tokenizer())(text, add_special_tokens=False).input_ids)


def api(url: str, **settings: Any) -> APIComparator:
    settings = {"provider": "openai", "api_key_env": "CHAT_KEY", "max_retries": 1, **settings}
    return APIComparator(model="tiny", base_url=url, **settings)
