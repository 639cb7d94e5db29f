"""Where a run goes on: Lightning's loop counters, set from the position of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from comlrl_lightning.data.datamodule import ITEMS_PER_STEP

State = Mapping[str, Any]
"""What the loader of the training data puts into a checkpoint."""


def position_in(checkpoint: Mapping[str, Any]) -> State | None:
    """The position of the data in a checkpoint of Lightning; None if it is of no fit."""
    loops = checkpoint.get("loops", {}).get("fit_loop", {"state_dict": {}})
    loaders = loops["state_dict"].get("combined_loader")
    if not loaders:
        return None
    # Checkpoints of version 0.1 count the steps in Lightning's progress alone.
    loaders[0].setdefault("batches", loops["epoch_loop.batch_progress"]["total"]["processed"])
    loaders[0].setdefault("cut_at", 0)
    position: State = loaders[0]
    return position


def align_loops(checkpoint: Mapping[str, Any]) -> None:
    """Set the counters of Lightning's training loops in a checkpoint to what follows from the position of the data.

    They depend on the hook that saved the checkpoint, and on how often the run was resumed before: an epoch that a
    limit has cut counts as over, one that is over may count as running. Inside an epoch they become those of the end of
    a batch, between two epochs those of a run that ended with the first.

    Args:
        checkpoint: What Lightning is about to load; changed in place.
    """
    position = position_in(checkpoint)
    if position is None:
        return
    loops = checkpoint["loops"]["fit_loop"]
    epoch, batches, steps = position["epoch"], position["batches"], steps_in_epoch(position)
    inside = int(steps > 0)
    loops["epoch_progress"] = {name: _counts(epoch + inside, epoch, epoch) for name in ("total", "current")}
    loops["epoch_loop.batch_progress"] = {
        "total": _counts(batches, batches, batches - inside),
        "current": _counts(steps, steps, max(steps - 1, 0)),
        "is_last_batch": False,
    }
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = batches - inside
    nothing = {"total": _counts(0, 0, 0), "current": _counts(0, 0, 0), "is_last_batch": False}
    loops["epoch_loop.val_loop.batch_progress"] = nothing


def check_epoch(trainer: Trainer, position: State | None) -> None:
    """Compare the length of this run's epochs with a position; call it once the data are there.

    Raises:
        ValueError: If the epoch that goes on is over by now.
    """
    if position is None:
        return
    steps, num_batches = steps_in_epoch(position), trainer.num_training_batches
    if steps >= num_batches:
        raise ValueError(
            f"limit_train_batches={trainer.limit_train_batches!r} makes epochs of {num_batches} batches, but the"
            f" checkpoint was saved inside an epoch after {steps}. Raise it above that, or resume from a checkpoint"
            " saved at the end of an epoch."
        )
    cut_at = position["cut_at"]
    if cut_at and not steps and cut_at < num_batches * position[ITEMS_PER_STEP]:
        rank_zero_warn(
            f"The checkpoint's last epoch ended after {cut_at} items, by limit_train_batches, and this run's epochs are"
            " longer: it goes on with the next one, and the rest of that epoch is left out. Resume with the same limit"
            " to go on as that run would have."
        )


def steps_in_epoch(position: State) -> int:
    """Number of steps of the running epoch that were trained."""
    return -(-int(position["position"]) // int(position[ITEMS_PER_STEP]))


def _counts(begun: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": begun, "started": begun, "processed": processed, "completed": completed}
