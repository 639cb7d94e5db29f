"""Fixtures of the agents' tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    """PEFT draws new adapters from the global random state."""
    torch.manual_seed(0)
