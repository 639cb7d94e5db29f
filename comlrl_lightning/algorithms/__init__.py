"""The algorithms, one LightningModule each."""

from comlrl_lightning.algorithms.actor_critic import IAC, MAAC, ActorCriticModule
from comlrl_lightning.algorithms.critic_free import MAGRPO, MAREINFORCE, MARLOO, CriticFreeModule, MAReMax
from comlrl_lightning.algorithms.madpo import MADPO
from comlrl_lightning.algorithms.marlhf import MARLHF
from comlrl_lightning.algorithms.module import CooperativeModule
from comlrl_lightning.algorithms.policy_gradient import PolicyGradientModule
from comlrl_lightning.algorithms.preference import PreferenceModule

POLICY_GRADIENT_ALGORITHMS: tuple[type[PolicyGradientModule], ...] = (MAREINFORCE, MAGRPO, MARLOO, MAReMax, IAC, MAAC)
"""Those that learn from rewards, in one or many turns."""
PREFERENCE_ALGORITHMS: tuple[type[PreferenceModule], ...] = (MADPO, MARLHF)
"""Those that learn from comparisons, in rounds."""
ALGORITHMS: tuple[type[CooperativeModule], ...] = (*POLICY_GRADIENT_ALGORITHMS, *PREFERENCE_ALGORITHMS)
"""Every algorithm that can be trained."""

__all__ = [
    "ALGORITHMS",
    "IAC",
    "MAAC",
    "MADPO",
    "MAGRPO",
    "MAREINFORCE",
    "MARLHF",
    "MARLOO",
    "POLICY_GRADIENT_ALGORITHMS",
    "PREFERENCE_ALGORITHMS",
    "ActorCriticModule",
    "CooperativeModule",
    "CriticFreeModule",
    "MAReMax",
    "PolicyGradientModule",
    "PreferenceModule",
]
