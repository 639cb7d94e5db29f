"""The few collective calls of the library; each is the identity when one process runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_meeting: Callable[[], None] | None = None


def meet_by(function: Callable[[], None] | None) -> None:
    """Set what `meet` does in this process, on all ranks alike; None: nothing."""
    global _meeting
    _meeting = function


def meet() -> None:
    """Take part in what other ranks still have to do together with this one, such as passes of a sharded model.

    Every collective call of this file begins with it: nobody may wait there for somebody who waits for him elsewhere.
    """
    if _meeting is not None:
        _meeting()


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Position of this process among them."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all processes, on the device of `tensor`."""
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def sum_over_ranks(value: float) -> float:
    """Sum of one number over all processes."""
    return float(all_reduce_sum(torch.tensor(float(value), dtype=torch.float64)))


def max_over_ranks(value: int) -> int:
    """Largest of one number over all processes."""
    return int(_all_reduce(torch.tensor(value), dist.ReduceOp.MAX))


def _all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if world_size() == 1:
        return tensor
    meet()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    reduced = tensor.detach().to(device, copy=True)
    dist.all_reduce(reduced, op=operation)
    return reduced.to(tensor.device)


def gather_objects(values: Sequence[T]) -> list[T]:
    """The values of all processes, one after another in rank order."""
    if world_size() == 1:
        return list(values)
    meet()
    gathered: list[list[T] | None] = [None] * world_size()
    dist.all_gather_object(gathered, list(values))
    return [value for part in gathered if part is not None for value in part]
