"""Random numbers of a key, from counter-based generators: equal on every machine, whatever was drawn before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def key_digest(key: Sequence[int]) -> int:
    """128-bit number of a key, equal on every machine and in every process."""
    digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global random numbers on the CPU and one device; afterwards they go on where they were.

    Other devices are left alone: to ask a GPU for its state takes a part of its memory, in every process.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def generator_of(key: Sequence[int]) -> np.random.Generator:
    """Random numbers of a key alone, whatever was drawn before."""
    return np.random.Generator(np.random.Philox(key=key_digest(key)))
