"""The few collective calls of the library; each is the identity when one process runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Position of this process among them."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum `tensor` over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def sum_over_ranks(value: float, device: torch.device) -> float:
    """Sum of one number over all processes."""
    return float(all_reduce_sum(torch.tensor(float(value), dtype=torch.float64, device=device)))


def max_over_ranks(value: int, device: torch.device) -> int:
    """Largest of one number over all processes."""
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def gather_objects(values: Sequence[T]) -> list[T]:
    """The values of all processes, one after another in rank order."""
    if world_size() == 1:
        return list(values)
    gathered: list[list[T] | None] = [None] * world_size()
    dist.all_gather_object(gathered, list(values))
    return [value for part in gathered if part is not None for value in part]
