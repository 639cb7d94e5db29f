"""The algorithms, one LightningModule each."""

from comlrl_lightning.algorithms.actor_critic import IAC, MAAC, ActorCriticModule
from comlrl_lightning.algorithms.cooperative import CooperativeModule
from comlrl_lightning.algorithms.reinforce import MAGRPO, MAREINFORCE, MARLOO, GroupRelativeModule, MAReMax

ALGORITHMS: tuple[type[CooperativeModule], ...] = (MAREINFORCE, MAGRPO, MARLOO, MAReMax, IAC, MAAC)
"""Every algorithm that can be trained."""

__all__ = [
    "ALGORITHMS",
    "IAC",
    "MAAC",
    "MAGRPO",
    "MAREINFORCE",
    "MARLOO",
    "ActorCriticModule",
    "CooperativeModule",
    "GroupRelativeModule",
    "MAReMax",
]
