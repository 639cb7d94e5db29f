"""JSON lines over `env_step` that a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning import Trainer

from comlrl_lightning.callbacks.support import batches_trained
from comlrl_lightning.files import Place
from comlrl_lightning.types import RolloutSource


class History:
    """One JSON object per line, each with its `env_step` and its `batch`, those trained before it was measured.

    Steps that learn from what was scored before do not move `env_step`. Use it on rank zero only.

    Args:
        place: The file.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._resumed_at: tuple[int, int] | None = None

    def check(self) -> None:
        """Refuse a file that is no history.

        Raises:
            ValueError: If it holds other lines.
        """
        if self.place.exists():
            for line in self._lines():
                self._position(line)

    def begin(self, trainer: Trainer, source: RolloutSource) -> None:
        """Drop what an earlier run wrote, or what was written after the checkpoint that this run resumes.

        Raises:
            ValueError: If the file is no history.
        """
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
        lines = ({"env_step": env_step, "batch": now[1], **row} for row in rows)
        self.place.append_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def replace(self, trainer: Trainer, env_step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Make these rows all there is."""
        self._keep(lambda place: False)
        self.add(trainer, env_step, rows)

    def _keep(self, wanted: Callable[[tuple[int, int]], bool]) -> None:
        if not self.place.exists():
            return
        kept = [line + "\n" for line in self._lines() if wanted(self._position(line))]
        self.place.write_text("".join(kept))

    def _lines(self) -> list[str]:
        # Only "\n" ends a line: texts hold other line breaks. A line without its end was cut off by a kill.
        return self.place.read_text().split("\n")[:-1]

    def _position(self, line: str) -> tuple[int, int]:
        """`env_step` and batch of a line."""
        try:
            row = json.loads(line)
            return row["env_step"], row.get("batch", 0)
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.place} holds lines that are no history of a run. It is left as it is: give another path."
            ) from None
