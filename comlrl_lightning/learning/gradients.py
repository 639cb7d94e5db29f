"""One optimizer step for several agents: sums of gradients over ranks, and a norm per agent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter

from comlrl_lightning.utilities.distributed import all_reduce_sum, world_size

Group = Sequence[Parameter]
"""The trainable parameters of one agent."""


@dataclass(slots=True)
class IdleSteps:
    """Optimizer steps in a row without anything to learn; a warning after ten of them, and ten times as many."""

    in_a_row: int = 0
    warn_at: int = 10

    def count(self, *, is_idle: bool) -> None:
        """Count a step. Call it on every rank, with the same answer."""
        self.in_a_row = self.in_a_row + 1 if is_idle else 0
        if self.in_a_row < self.warn_at:
            return
        self.warn_at *= 10
        rank_zero_warn(
            f"The last {self.in_a_row} optimizer steps had nothing to learn: all joint completions of an item had the"
            " same reward. max_steps and lr_scheduler count such steps; no weight moved. Look at turn_1/reward_mean."
            " Give rewards that tell completions apart (partial credit), easier items or a stronger model, or raise"
            " num_generations (num_candidates for pairs) or sampling.temperature."
        )


def average_gradients(groups: Sequence[Group], num_nodes: int, is_active: Sequence[bool]) -> list[bool]:
    """Turn local sums of gradients into the mean over the nodes of all ranks.

    A parameter without a gradient on any rank keeps none, so that an optimizer with momentum does not move it.

    Args:
        groups: `[N]` parameters of each agent.
        num_nodes: Nodes of this rank's part of the mini-batch.
        is_active: `[N]` whether this rank has a gradient for the agent.

    Returns:
        `[N]` whether any rank has one.
    """
    counts = torch.tensor([num_nodes, *map(int, is_active)], dtype=torch.float64)
    total, *active = all_reduce_sum(counts).tolist()
    for group, has_gradient in zip(groups, active, strict=True):
        if has_gradient:
            _average(group, total)
    return [has_gradient > 0 for has_gradient in active]


def _average(group: Group, total: float) -> None:
    if world_size() > 1:
        flat = torch.cat([_gradient(parameter).flatten() for parameter in group])
        found = flat.new_tensor([parameter.grad is not None for parameter in group])
        sizes = [*(parameter.numel() for parameter in group), len(group)]
        *parts, counts = torch.split(all_reduce_sum(torch.cat([flat, found])), sizes)
        for parameter, part, count in zip(group, parts, counts.tolist(), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if count else None
    for parameter in group:
        if parameter.grad is not None:
            parameter.grad.div_(total)


def _gradient(parameter: Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def nonfinite_on_any_rank(sums: Mapping[str, float]) -> list[str]:
    """Names of the sums that are not finite on some rank: the same answer on every rank.

    Args:
        sums: Sums of this rank by name; every rank has the same names in the same order.
    """
    broken = torch.tensor([not math.isfinite(value) for value in sums.values()], dtype=torch.float64)
    return [name for name, count in zip(sums, all_reduce_sum(broken).tolist(), strict=True) if count]


def clip_gradients(group: Group, max_norm: float | None) -> float:
    """Scale the gradients of one agent to a norm of at most `max_norm`.

    Args:
        group: Parameters of the agent.
        max_norm: Largest norm; None only measures.

    Returns:
        The norm before clipping.
    """
    bound = float("inf") if max_norm is None else max_norm
    return float(torch.nn.utils.clip_grad_norm_(group, bound))
