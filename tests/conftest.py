"""Settings of every test: no network, one thread per process."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Several threads on tiny tensors wait for each other longer than they compute.
torch.set_num_threads(1)
