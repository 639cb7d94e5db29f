"""Special tokens in texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def starts_with_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a text brings the token that some tokenizers put before every text."""
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
