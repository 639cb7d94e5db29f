"""JSON lines over `env_step` that a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer

from comlrl_lightning.callbacks.support import batches_trained, write_whole
from comlrl_lightning.types import RolloutSource


class History:
    """One JSON object per line, each with its `env_step` and its `batch`, those trained before it was measured.

    Steps that learn from what was scored before do not move `env_step`. Use it on rank zero only.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._resumed_at: tuple[int, int] | None = None

    def begin(self, trainer: Trainer, source: RolloutSource) -> None:
        """Drop what an earlier run wrote, or what was written after the checkpoint that this run resumes."""
        self._resumed_at = now = source.env_step, batches_trained(trainer)
        if trainer.ckpt_path is not None:
            self._keep(lambda place: place <= now)
        elif source.env_step == 0:
            self._keep(lambda place: False)
        else:  # another fit of the module, which counts batches anew
            self._keep(lambda place: place[0] <= source.env_step)

    def add(self, trainer: Trainer, env_step: int, rows: Iterable[Mapping[str, Any]], again: bool = False) -> None:
        """Append rows; an evaluation that a resumed run repeats takes the place of the first.

        Args:
            trainer: Knows the batch.
            env_step: When the rows were measured.
            rows: The rows.
            again: Whether they take the place of others of the same `env_step` and batch in any case.
        """
        now = env_step, batches_trained(trainer)
        if again or now == self._resumed_at:
            self._keep(lambda place: place != now)
        self._resumed_at = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for row in rows:
                line = {"env_step": env_step, "batch": now[1], **row}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def replace(self, trainer: Trainer, env_step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Make these rows all there is."""
        self._keep(lambda place: False)
        self.add(trainer, env_step, rows)

    def _keep(self, wanted: Callable[[tuple[int, int]], bool]) -> None:
        if not self._path.exists():
            return
        # Only "\n" ends a line: texts hold other line breaks. A line without its end was cut off by a kill.
        *lines, _ = self._path.read_text(encoding="utf-8").split("\n")
        kept = [line + "\n" for line in lines if wanted(_place(json.loads(line)))]
        write_whole(self._path, lambda path: path.write_text("".join(kept), encoding="utf-8"))


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    """`env_step` and batch of a line."""
    return row["env_step"], row.get("batch", 0)
