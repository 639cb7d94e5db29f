"""What a user writes about a joint reward model, which learns from pairs of joint completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from comlrl_lightning.agents.settings import is_name
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic
from comlrl_lightning.keywords import known_keywords
from comlrl_lightning.utilities.checks import check_number, check_whole
from comlrl_lightning.utilities.documentation import document_fields

REWARD_MODEL = "reward_model"
"""Name of the reward model's adapter, of its parameter group and of its folder."""


@known_keywords
@document_fields
@dataclass(frozen=True)
class JointRewardModel:
    """A model that reads what all agents were asked and answered, and says how good their answers are together.

    It is fitted to pairs, so that the better joint completion of each gets the larger score
    (https://arxiv.org/abs/1706.03741). A score means something beside others of the same prompts only.
    """

    model: AdapterCritic | ModelCritic = field(default_factory=AdapterCritic)
    """What reads: one more adapter on the agents' frozen base model, or a language model of its own."""
    learning_rate: float | None = None
    """None: 1e-4, or 1e-5 where all weights of a model are trained."""
    num_epochs: int = 1
    """Epochs of each round in which it is fitted."""
    batch_size: int | None = None
    """Pairs per optimizer step, over all ranks. None: as many as a training step has."""
    freeze_backbone: bool = False
    """Train nothing but the head."""
    held_out_share: float = 0.1
    """Share of the task items whose pairs are kept out of the fit, to measure it."""
    standardize: bool = True
    """Center and scale scores by their mean and standard deviation over the round's pairs, which then stay for a round.

    Fitting leaves the zero of the scores open. An algorithm without a baseline needs one that is the same all along."""
    centering_coef: float = 0.0
    """Weight of the square of the sum of a pair's scores in the loss, which keeps scores around 0."""
    fresh_each_round: bool = True
    """Start each round's fit from the first weights, not from those of the last round."""

    def __post_init__(self) -> None:
        self._check_model()
        check_whole(1, "JointRewardModel", num_epochs=self.num_epochs)
        if self.batch_size is not None:
            check_whole(1, "JointRewardModel", batch_size=self.batch_size)
        if self.learning_rate is not None:
            self._check("learning_rate", "a number above 0", lambda value: value > 0)
        self._check("held_out_share", "a number from 0 to below 1", lambda value: 0 <= value < 1)
        self._check("centering_coef", "a number of at least 0", lambda value: value >= 0)
        for name in ("freeze_backbone", "standardize", "fresh_each_round"):
            if not isinstance(vars(self)[name], bool):
                raise ValueError(f"JointRewardModel({name}={vars(self)[name]!r}) is out of range. Use True or False.")

    def _check(self, name: str, wanted: str, fits: Callable[[float], bool]) -> None:
        check_number(wanted, fits, "JointRewardModel", **{name: vars(self)[name]})

    def _check_model(self) -> None:
        if not isinstance(self.model, AdapterCritic | ModelCritic):
            raise ValueError(
                f"JointRewardModel(model={self.model!r}) cannot read the answers of all agents. "
                "Use AdapterCritic() or ModelCritic(model=...)."
            )
        if isinstance(self.model, ModelCritic) and self.model.models is not None:
            raise ValueError(
                f"JointRewardModel(model=ModelCritic(models=...)) has {len(self.model.models)} models, but one reads "
                "the answers of all agents. Give model=."
            )
        folders = self.model.adapters if isinstance(self.model, AdapterCritic) else None
        if folders is not None and (is_name(folders) or len(folders) != 1):
            raise ValueError(
                f"JointRewardModel(model=AdapterCritic(adapters={folders!r})) is one reward model. "
                "Give a list with one folder."
            )

    @property
    def initial_learning_rate(self) -> float:
        """The learning rate before any schedule."""
        if self.learning_rate is not None:
            return self.learning_rate
        trains_all = isinstance(self.model, ModelCritic) and self.model.lora is None and not self.freeze_backbone
        return 1e-5 if trains_all else 1e-4
