"""Critics: what they read, the language models that read it, and the heads that turn it into values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from comlrl_lightning.agents.settings import CriticSettings
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.rollouts.types import Completion

CriticType = Literal["v", "q"]


class CriticTeam(nn.Module):
    """The critics of a team: one for each agent, or one for all."""

    num_critics: int
    """1 if central, else N."""
    num_outputs: int
    """Columns of `values`: 1 or N if central, else N."""

    @classmethod
    def build(
        cls,
        settings: CriticSettings,
        team: AgentTeam,
        *,
        centralized: bool,
        critic_type: CriticType = "v",
        num_outputs: int = 1,
    ) -> CriticTeam:
        """Load or make the critics that the settings describe; call it once, right after `AgentTeam.build`."""
        raise NotImplementedError

    def values(self, samples: Sequence[Sequence[Completion]]) -> Tensor:
        """`[R, num_outputs]` (central) or `[R, N]` (agent i's own critic in column i), with gradients where enabled.

        Args:
            samples: `[R][N]` joint completions with their prompts.
        """
        raise NotImplementedError

    def lengths(self, samples: Sequence[Sequence[Completion]]) -> list[int]:
        """`[R]` tokens that the critics read of each joint completion (the longest of the N if not central)."""
        raise NotImplementedError

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """Trained parameters of ``critic``, or of ``critic_0``, ``critic_1``, ...; those of an agent are not in it."""
        raise NotImplementedError

    def shares_parameters(self) -> bool:
        """Whether the value loss reaches parameters of the agents (`ValueHead`)."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Write ``critic/``, ``critic_0/`` ..., or a head into each ``agent_i/``."""
        raise NotImplementedError
