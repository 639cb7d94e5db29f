"""Tiny random language models and byte-level tokenizers, made in code: no files, no network, milliseconds per step.

Every builder seeds its own weights, so that two calls with the same `seed` give equal models, and leaves the global
random state alone. Weights are drawn wide, so that greedy answers are not just one repeated token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
VOCAB_SIZE = 259
"""256 bytes and three special tokens; 256 is `BOS`, 257 is `EOS`, 258 is `PAD`."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_tokenizer(
    pad: Literal["own", "eos"] | None = "own", *, add_bos: bool = True, chat: bool = False, reverse: bool = False
) -> PreTrainedTokenizerBase:
    """Byte-level tokenizer: one token per byte.

    Args:
        pad: A padding token of its own, the end-of-sequence token as padding, or none at all.
        add_bos: Put `BOS` in front of every encoded text.
        chat: Give it a chat template, which writes `BOS` itself.
        reverse: Number the bytes from the other end, for agents whose token ids must differ.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    backend = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, PAD)])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token={"own": PAD, "eos": EOS, None: None}[pad]
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _seeded(model_class: type[PreTrainedModel], config: Any, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.generation_config.eos_token_id = config.eos_token_id
    return model.eval()


_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "initializer_range": 0.3,
}
_ROTARY: dict[str, Any] = {
    **_SHARED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def tiny_llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Llama with grouped-query attention and an untied head."""
    return _seeded(LlamaForCausalLM, LlamaConfig(**{**_ROTARY, "tie_word_embeddings": False, **overrides}), seed)


def tiny_qwen2(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Qwen2 (biases in the attention) with tied embeddings."""
    return _seeded(Qwen2ForCausalLM, Qwen2Config(**{**_ROTARY, "tie_word_embeddings": True, **overrides}), seed)


def tiny_qwen3(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Qwen3 (normalized queries and keys) with tied embeddings."""
    return _seeded(Qwen3ForCausalLM, Qwen3Config(**{**_ROTARY, "tie_word_embeddings": True, **overrides}), seed)


def tiny_gpt2(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """GPT-2: `Conv1D` layers, learned absolute positions (128 of them), tied embeddings, dropout 0.1 as published."""
    settings = {**_SHARED, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **overrides}
    return _seeded(GPT2LMHeadModel, GPT2Config(**settings), seed)


def tiny_gemma(seed: int = 0, soft_cap: float | None = 5.0, **overrides: Any) -> PreTrainedModel:
    """Gemma 2: tied and scaled embeddings, sliding windows, logits soft-capped (its head is more than a product)."""
    settings = {
        **_ROTARY,
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
        "final_logit_softcapping": soft_cap,
        "tie_word_embeddings": True,
        **overrides,
    }
    return _seeded(Gemma2ForCausalLM, Gemma2Config(**settings), seed)


def save_tiny(
    folder: str | Path, model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> str:
    """Write a model folder that `from_pretrained` loads; by default the tiny Llama. Returns the path as a string."""
    (model if model is not None else tiny_llama()).save_pretrained(folder)
    (tokenizer if tokenizer is not None else tiny_tokenizer(chat=True)).save_pretrained(folder)
    return str(folder)
