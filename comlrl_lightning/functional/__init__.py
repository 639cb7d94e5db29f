"""The mathematics of cooperative training: tensors in, tensors out, without state.

Notation of the whole package (shapes are written in backticks, the last index varies fastest):

====== ================================================================
symbol meaning
====== ================================================================
B      tasks
N      agents
K      completions per agent and node, the *group* that is compared
J      joint completions per node: K (aligned) or K^N (cross)
T      turns
P      prompt tokens
C      completion tokens
V      vocabulary
G      groups of one agent and turn
R      completions in one call, of any agents and nodes
M      token positions in one call
H      hidden size
====== ================================================================

A *node* is one turn of one task: a prompt per agent, K completions per agent, J scored joint completions.
`completion_mask` is True where a sampled token counts. Nothing here takes a mean that ranks would have to share: losses
and counts are sums, to be added before they are divided.
"""

from comlrl_lightning.functional.advantages import (
    Baseline,
    Normalization,
    batch_moments,
    batch_rms,
    group_advantages,
    group_max,
    group_mean,
    leave_one_out,
    subtract_baseline,
    subtract_kl,
)
from comlrl_lightning.functional.kl import kl_estimate, sequence_kl
from comlrl_lightning.functional.log_probs import chunked_log_probs, masked_sum, token_log_probs
from comlrl_lightning.functional.policy import (
    ImportanceLevel,
    LossAggregation,
    PolicyLoss,
    policy_loss,
    token_divisors,
)
from comlrl_lightning.functional.preferences import (
    PreferenceLossType,
    bradley_terry_loss,
    joint_preference_loss,
    sequence_log_probs,
    sequence_margins,
)
from comlrl_lightning.functional.returns import Parents, agent_returns, node_weights, tree_returns
from comlrl_lightning.functional.values import (
    Credit,
    advantage_moments,
    center_and_scale,
    explained_variance,
    explained_variance_moments,
    gae,
    leave_one_out_weights,
    value_loss,
)

__all__ = [
    "Baseline",
    "Credit",
    "ImportanceLevel",
    "LossAggregation",
    "Normalization",
    "Parents",
    "PolicyLoss",
    "PreferenceLossType",
    "advantage_moments",
    "agent_returns",
    "batch_moments",
    "batch_rms",
    "bradley_terry_loss",
    "center_and_scale",
    "chunked_log_probs",
    "explained_variance",
    "explained_variance_moments",
    "gae",
    "group_advantages",
    "group_max",
    "group_mean",
    "joint_preference_loss",
    "kl_estimate",
    "leave_one_out",
    "leave_one_out_weights",
    "masked_sum",
    "node_weights",
    "policy_loss",
    "sequence_kl",
    "sequence_log_probs",
    "sequence_margins",
    "subtract_baseline",
    "subtract_kl",
    "token_divisors",
    "token_log_probs",
    "tree_returns",
    "value_loss",
]
