"""Every metric key of the library, and the table that averages their values between two logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from comlrl_lightning.utilities.distributed import all_reduce_sum

TURN_METRICS = ("reward_mean", "expected_return")
"""Under ``turn_k/``: mean processed reward, mean discounted return from this turn on."""
TURN_KL_METRICS = ("reference_kl_mean", "reference_kl_penalty_mean")
"""Under ``turn_k/`` with a reference policy: sequence KL estimate in nats, and what it costs. Both policies are
taken at the temperature of the sampling, in an evaluation at its own. Greedy completions are no sample of any such
policy: for them it is the distance at temperature 1 along the likeliest completions, and no estimate of a KL."""
NORM_METRICS = ("grad_norm", "clipped_update_share")
"""Under the name of each parameter group: gradient norm before clipping, share of the optimizer steps in which it
exceeded `max_grad_norm`, so that the step was shortened."""
AGENT_METRICS = (
    "loss",
    *NORM_METRICS,
    "completion_tokens",
    "truncated_share",
    "zero_advantage_share",
    "entropy",
    "clip_share",
    "effective_sample_size",
    "sampler_gap",
)
"""Under ``agent_i/``: policy loss, gradient norm and how often it was clipped, tokens per completion, share of
completions cut by the token limit, share of groups without any advantage, entropy per token in nats, share of clipped
tokens, effective sample size of the importance ratios as a share, mean absolute gap between the sampler's and the
update's log-probs."""
CRITIC_METRICS = ("value_loss", "explained_variance", "td_error")
"""Under ``agent_i/`` with critics, all alike for one critic of a shared reward: squared error of the values, share of
the variance of the Monte-Carlo returns that the values explained before the update (1 is perfect), mean absolute TD
error. The `NORM_METRICS` of a critic stand under its own name, ``critic/`` or ``critic_i/``."""
DIRECT_METRICS = ("margin", "chosen_log_prob", "rejected_log_prob", "log_prob_drift")
"""Under ``agent_i/`` when policies are fitted to pairs: mean margin between winner and loser in nats, the mean
log-probabilities of winners and of losers that it is the difference of (both fall where the loss pushes losers down
only), and the mean absolute change of a completion's log-probability since it was sampled, in nats."""
PAIR_METRICS = ("pairs_per_item", "reward_gap", "comparator_reward_mean", "comparator_unparsed_share")
"""Under ``preference/``: pairs that an item gave, mean difference of their rewards, mean reward of the comparator (both
by whatever ranks the candidates), share of its joint completions in which no agent's answer was found."""
FIT_METRICS = ("loss", "accuracy")
"""Under ``preference/`` when policies are fitted to pairs, under ``reward_model/`` when a reward model is: mean loss
and share of the pairs that come out right, both before the step. ``reward_model/held_out_accuracy`` is the share among
the pairs of items that are kept out of the fit, after each epoch."""
LEARNED = "learned/"
"""Before the reward metrics of rollouts that a reward model has scored."""
UNPARSED = "unparsed_share"
"""Where one model answers for all agents: share of its completions in which no answer was found."""
EPISODE_METRICS = ("episode/return_mean", "episode/turns_mean", "episode/unfinished_share")
"""With an environment: sum of an episode's rewards, number of its steps, share of episodes that ``num_turns`` ended."""
REWARD_TIMEOUTS = "reward_timeouts"
"""Where a reward stands for them: calls of the reward function, per batch and process, that ran out of time."""
LEFT_OUT = "left_out"
"""With ``reward_none="skip"``: joint completions, per batch and process, that were left out of their groups."""
TIME_METRICS = ("generation", "reward", "update")
"""Under ``time/``: seconds per training step."""


def turn_key(turn: int, name: str) -> str:
    """Key of a metric of one turn, from 1."""
    return f"turn_{turn}/{name}"


def agent_key(agent: int, name: str) -> str:
    """Key of a metric of one agent, from 0."""
    return group_key(f"agent_{agent}", name)


def group_key(group: str, name: str) -> str:
    """Key of a metric of one parameter group: ``agent_i``, ``critic`` or ``critic_i``."""
    return f"{group}/{name}"


def part_key(name: str) -> str:
    """Key of one part of `WeightedRewards`."""
    return f"reward/{name}"


def preference_key(name: str) -> str:
    """Key of a metric of preference pairs."""
    return group_key("preference", name)


def preference_keys(num_agents: int, direct: bool) -> list[str]:
    """What an algorithm of preferences logs in addition.

    Args:
        num_agents: N.
        direct: Whether policies are fitted to pairs; otherwise a reward model is.
    """
    pairs = list(map(preference_key, PAIR_METRICS))
    if direct:
        agents = [agent_key(agent, name) for agent in range(num_agents) for name in DIRECT_METRICS]
        return [*pairs, *map(preference_key, FIT_METRICS), *agents]
    fit = [group_key("reward_model", name) for name in (*FIT_METRICS, "held_out_accuracy", *NORM_METRICS)]
    return [*pairs, *fit, *(LEARNED + key for key in turn_keys(1, with_kl=False))]


def critic_keys(num_agents: int, groups: Sequence[str]) -> list[str]:
    """What an algorithm with critics logs in addition; `groups` are the names of the critics' parameter groups."""
    if not groups:
        return []
    agents = [agent_key(agent, name) for agent in range(num_agents) for name in CRITIC_METRICS]
    return [*agents, *(group_key(group, name) for group in groups for name in NORM_METRICS)]


def training_keys(num_turns: int, num_agents: int, with_kl: bool, parts: Iterable[str] = ()) -> list[str]:
    """All keys that training can log in every algorithm."""
    agents = [agent_key(agent, name) for agent in range(num_agents) for name in AGENT_METRICS]
    return [
        *turn_keys(num_turns, with_kl),
        *map(part_key, parts),
        *agents,
        *(f"time/{name}" for name in TIME_METRICS),
        "nonfinite_updates",
        REWARD_TIMEOUTS,
        LEFT_OUT,
    ]


def evaluation_keys(num_turns: int, with_kl: bool, parts: Iterable[str] = ()) -> list[str]:
    """All keys that an evaluation can log, without their prefix ``eval/``."""
    return [*turn_keys(num_turns, with_kl), *map(part_key, parts), "final_reward_mean", REWARD_TIMEOUTS, LEFT_OUT]


def turn_keys(num_turns: int, with_kl: bool) -> list[str]:
    """The keys that exist once per turn."""
    names = TURN_METRICS + (TURN_KL_METRICS if with_kl else ())
    return [turn_key(turn, name) for turn in range(1, num_turns + 1) for name in names]


class MetricTable(nn.Module):
    """Means of a fixed set of keys over everything that came since the last `pop`, over all ranks.

    The sums are float64 and part of the state dict, so that a resumed run logs what an unbroken run logs. They stay on
    the CPU, as not every device has float64, and a number from the CPU need not wait for another device.

    Args:
        keys: The keys that may be updated.
        prefix: Written before each key by `pop`.
    """

    def __init__(self, keys: Iterable[str], prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self._means: dict[str, MeanMetric] = {}
        with torch.device("cpu"):
            for key in keys:
                self._means[key] = MeanMetric(nan_strategy="error", dist_sync_fn=_summed)
                self._means[key].set_dtype(torch.float64)
                self._means[key].persistent(True)
        self.means = nn.ModuleDict(self._means)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._means)} keys)"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MetricTable:
        """Follow the module neither to its device nor to its precision."""
        return self

    def update(self, key: str, value: float | Tensor, weight: float = 1.0) -> None:
        """Add one value with its weight, from any device."""
        self._means[key].update(value.cpu() if isinstance(value, Tensor) else value, weight)

    def pop(self) -> dict[str, float]:
        """Mean of each key that got a value on any rank, then forget all. Call it on every rank."""
        weights = torch.stack([torch.as_tensor(mean.weight) for mean in self._means.values()])
        seen = all_reduce_sum(weights) > 0
        result = {}
        for (key, mean), has_value in zip(self._means.items(), seen.tolist(), strict=True):
            if has_value:
                mean.update(0.0, 0.0)  # a rank without a value takes part in the reduction, without a warning
                result[self.prefix + key] = float(mean.compute())
            with torch.inference_mode(False):  # an evaluation must not leave states that training cannot write
                mean.reset()
        return result


def _summed(tensor: Tensor, group: object) -> list[Tensor]:
    """Sum over all ranks in the form in which torchmetrics takes the parts of them, which it adds up."""
    return [all_reduce_sum(tensor)]
