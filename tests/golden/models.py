"""Language models whose weights are equal on every CPU, with one token per letter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from comlrl_lightning import LoraSettings, Separate, SharedBase
from tests.tiny_lm import tiny_gpt2, tiny_llama

LETTERS = "abcdefghijklmnopqrstuvwxyz :!"
BOS, EOS, PAD = (len(LETTERS) + place for place in range(3))
VOCAB_SIZE = len(LETTERS) + 3
LORA = LoraSettings(rank=2, alpha=4.0)
SPECIAL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def tokenizer() -> PreTrainedTokenizerBase:
    """One token per letter, so that the text of a completion shows its tokens; other characters are left out."""
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(LETTERS)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<bos>", "<eos>", "<pad>")])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def llama() -> PreTrainedModel:
    """One layer of width 16."""
    return _redrawn(
        tiny_llama,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )


def gpt2() -> PreTrainedModel:
    """One layer of width 16, of another family."""
    return _redrawn(tiny_gpt2, n_embd=16, n_layer=1, n_head=2, n_positions=256)


def _redrawn(build: Callable[..., PreTrainedModel], **shape: Any) -> PreTrainedModel:
    """A model in double precision with weights from numpy: torch's normal numbers depend on the CPU."""
    model = build(**SPECIAL, **shape).to(torch.float64)
    generator = np.random.Generator(np.random.Philox(key=0))
    for parameter in model.parameters():
        noise = torch.from_numpy(0.3 * generator.standard_normal(tuple(parameter.shape)))
        # Scales of norms stay around 1.
        parameter.data = 1 + noise / 3 if parameter.dim() == 1 and bool((parameter == 1).all()) else noise
    # Completions end after some letters: "!" ends one in silence, as the end-of-sequence token does.
    model.generation_config.eos_token_id = [EOS, *range(8)]
    model.tie_weights()
    return model


def shared(num_agents: int = 2) -> SharedBase:
    """Agents with adapters on one model."""
    return SharedBase(llama(), num_agents=num_agents, lora=LORA, tokenizer=tokenizer())


def separate() -> Separate:
    """Two models of two families, all weights trained."""
    return Separate([llama(), gpt2()], tokenizers=[tokenizer(), tokenizer()])


def critic_model() -> Any:
    """A model for a critic of its own."""
    return llama()
