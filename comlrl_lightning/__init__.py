"""Cooperative multi-agent reinforcement learning of language models as PyTorch Lightning modules."""

from comlrl_lightning._version import __version__

__all__ = ["__version__"]
