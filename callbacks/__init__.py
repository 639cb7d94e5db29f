"""Callbacks: when to evaluate, what to measure, what to write and show."""

from comlrl_lightning.callbacks.batch_checkpoint import BatchCheckpoint
from comlrl_lightning.callbacks.completions_table import CompletionsTable
from comlrl_lightning.callbacks.eval_interval import EvalInterval
from comlrl_lightning.callbacks.eval_metrics import EvalMetrics
from comlrl_lightning.callbacks.json_export import JSONExport
from comlrl_lightning.callbacks.json_predictions import JSONPredictions
from comlrl_lightning.callbacks.preference_rounds import PreferenceRounds
from comlrl_lightning.callbacks.reward_curve import RewardCurve
from comlrl_lightning.callbacks.rollout_metrics import RolloutMetrics, RolloutRecord
from comlrl_lightning.callbacks.rollout_progress import RolloutProgress
from comlrl_lightning.callbacks.save_agents import SaveAgents

__all__ = [
    "BatchCheckpoint",
    "CompletionsTable",
    "EvalInterval",
    "EvalMetrics",
    "JSONExport",
    "JSONPredictions",
    "PreferenceRounds",
    "RewardCurve",
    "RolloutMetrics",
    "RolloutProgress",
    "RolloutRecord",
    "SaveAgents",
]
