"""Settings of every test: no network, one thread per process."""

from __future__ import annotations

import gc
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# What runs in the background inherits a deaf ear to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several threads on tiny tensors wait for each other longer than they compute.
torch.set_num_threads(1)

# Torch, transformers and pytest itself stay for good: to look through all their objects again and again took a tenth of
# the time of a run.
gc.freeze()
gc.set_threshold(50_000, 20, 50)
