"""The algorithms, one LightningModule each."""

from comlrl_lightning.algorithms.cooperative import CooperativeModule
from comlrl_lightning.algorithms.reinforce import MAGRPO, MAREINFORCE, MARLOO, GroupRelativeModule, MAReMax

ALGORITHMS: tuple[type[CooperativeModule], ...] = (MAREINFORCE, MAGRPO, MARLOO, MAReMax)
"""Every algorithm that can be trained."""

__all__ = ["ALGORITHMS", "MAGRPO", "MAREINFORCE", "MARLOO", "CooperativeModule", "GroupRelativeModule", "MAReMax"]
