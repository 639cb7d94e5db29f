"""Networks without randomness of their own: rollouts and updates must score the same policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig


def switch_off_dropout(network: nn.Module) -> None:
    """Set every probability of dropout and every amount of training noise to 0, in modules and in their settings."""
    for module in network.modules():
        config = vars(module).get("config")
        for name, value in vars(config).items() if isinstance(config, PreTrainedConfig) else ():
            # Some models read it at every call.
            if isinstance(value, int | float) and not isinstance(value, bool) and "drop" in name:
                vars(config)[name] = 0.0
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                vars(module)[name] = 0.0


@contextmanager
def in_evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Let a network that is in one mode be in evaluation mode."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
