"""The modes of torch that a user's function runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def user_code() -> Iterator[None]:
    """Run a user's function without autocast, with gradients, and with float32 as torch's default dtype.

    Torch's modes and defaults are afterwards what they were, whatever the function did to them.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with modes_of_thread():
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def modes_of_thread() -> Iterator[None]:
    """The part of `user_code` that each thread has for itself: all but the default dtype."""
    device = torch.get_default_device()
    try:
        with (
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        use_default_device(device)


def use_default_device(device: torch.device) -> None:
    """Let new tensors of this thread be made there."""
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)
