"""How completions are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from comlrl_lightning.keywords import known_keywords
from comlrl_lightning.utilities.checks import check_choice_of, check_number, check_whole
from comlrl_lightning.utilities.documentation import document_fields


@known_keywords
@document_fields
@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    max_new_tokens: int = 256
    """Most tokens per completion, the end-of-sequence token included."""
    min_new_tokens: int = 0
    """No end-of-sequence token before so many tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this much probability; 1 draws from all."""
    top_k: int | None = None
    """Draw from so many most likely tokens; None draws from all."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; they are cut from its text, their tokens stay in the loss."""
    backend: Literal["native", "transformers"] = "native"
    """Our own decoding loop, or `generate` of transformers (slower, seeded per call and not per completion)."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"Sampling(stop={self.stop!r}) holds something other than texts. Use non-empty strings.")
        object.__setattr__(self, "stop", tuple(stop))
        check_whole(1, "Sampling", max_new_tokens=self.max_new_tokens)
        check_whole(0, "Sampling", min_new_tokens=self.min_new_tokens)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"Sampling(min_new_tokens={self.min_new_tokens}) is above max_new_tokens={self.max_new_tokens}. "
                "Lower it."
            )
        check_number("0 or more", lambda value: value >= 0, "Sampling", temperature=self.temperature)
        check_number("a number above 0 and up to 1", lambda value: 0 < value <= 1, "Sampling", top_p=self.top_p)
        if self.top_k is not None:
            check_whole(1, "Sampling", top_k=self.top_k)
        check_choice_of("Sampling", "backend", self.backend, ("native", "transformers"))
