"""Settings of losses as records, checked when they are made; the algorithms declare them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from comlrl_lightning.functional import ImportanceLevel, LossAggregation
from comlrl_lightning.utilities.checks import check_at_least, check_choice, check_number, check_positive, check_share


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of the policy loss, as `CooperativeModule` documents them."""

    temperature: float
    reference_kl_coef: float
    clip_epsilon: float | None
    clip_epsilon_high: float | None
    importance_level: ImportanceLevel
    entropy_coef: float
    loss_aggregation: LossAggregation
    max_new_tokens: int
    dual_clip: float | None

    def __post_init__(self) -> None:
        check_at_least(0.0, reference_kl_coef=self.reference_kl_coef, entropy_coef=self.entropy_coef)
        check_positive(clip_epsilon=self.clip_epsilon, clip_epsilon_high=self.clip_epsilon_high)
        if self.clip_epsilon is not None and self.clip_epsilon >= 1:
            raise ValueError(f"clip_epsilon={self.clip_epsilon!r} is out of range. Use a number below 1, such as 0.2.")
        if self.clip_epsilon is None and self.clip_epsilon_high is not None:
            raise ValueError(f"clip_epsilon_high={self.clip_epsilon_high!r} needs clip_epsilon. Give both.")
        if self.dual_clip is not None:
            check_number("a number above 1", lambda value: value > 1, dual_clip=self.dual_clip)
            if self.clip_epsilon is None:
                raise ValueError(f"dual_clip={self.dual_clip!r} needs clip_epsilon. Give both.")
        check_choice(("token", "sequence"), importance_level=self.importance_level)
        check_choice(get_args(LossAggregation), loss_aggregation=self.loss_aggregation)


@dataclass(frozen=True, slots=True)
class ValueSettings:
    """Settings of critics and of their loss, as `ActorCriticModule` documents them."""

    critic_type: Literal["v", "q"]
    critic_learning_rate: float | None
    value_loss_coef: float
    value_clip_range: float | None
    gae_lambda: float
    advantage_normalization: Literal["batch", False]

    def __post_init__(self) -> None:
        check_choice(("v", "q"), critic_type=self.critic_type)
        if self.critic_learning_rate is not None:
            check_at_least(0.0, critic_learning_rate=self.critic_learning_rate)
        check_positive(value_loss_coef=self.value_loss_coef, value_clip_range=self.value_clip_range)
        check_share(gae_lambda=self.gae_lambda)
        check_choice(("batch", False), advantage_normalization=self.advantage_normalization)
