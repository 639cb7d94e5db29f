"""JSON lines over `env_step` that a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer

from comlrl_lightning.callbacks.support import write_whole
from comlrl_lightning.rollouts.types import RolloutSource


class History:
    """One JSON object per line, each with its `env_step`. Use it on rank zero only.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._resumed_at: int | None = None

    def begin(self, trainer: Trainer, source: RolloutSource) -> None:
        """Drop what an earlier run wrote, or what was written after the checkpoint that this run resumes."""
        self._resumed_at = source.env_step
        is_new = source.env_step == 0 and trainer.ckpt_path is None
        self._keep(lambda env_step: not is_new and env_step <= source.env_step)

    def add(self, env_step: int, rows: Iterable[Mapping[str, Any]], again: bool = False) -> None:
        """Append rows; an evaluation that a resumed run repeats takes the place of the first.

        Args:
            env_step: When the rows were measured.
            rows: The rows.
            again: Whether they take the place of others at this `env_step` in any case.
        """
        if again or env_step == self._resumed_at:
            self._keep(lambda other: other != env_step)
        self._resumed_at = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"env_step": env_step, **row}, ensure_ascii=False) + "\n" for row in rows)

    def replace(self, env_step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Make these rows all there is."""
        self._keep(lambda other: False)
        self.add(env_step, rows)

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        if not self._path.exists():
            return
        # Only "\n" ends a line: texts hold other line breaks. A line without its end was cut off by a kill.
        *lines, _ = self._path.read_text(encoding="utf-8").split("\n")
        kept = [line + "\n" for line in lines if wanted(json.loads(line)["env_step"])]
        write_whole(self._path, lambda path: path.write_text("".join(kept), encoding="utf-8"))
