"""Tiny HF models with random weights, written as HF directories: small enough for a test, shaped to catch layout mistakes.

No two of hidden, intermediate, queries, keys and vocabulary sizes agree, norms are not all ones, and the vocabulary is odd.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_SIZES = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.08,
    "attn_implementation": "eager",
}


def write_qwen3(path: Path, tied: bool, **sizes: object) -> PreTrainedModel:
    """Float32 Qwen3 with head_dim 16 (so queries are wider than hidden)."""
    config = Qwen3Config(**{**_SIZES, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied, **sizes})
    return _write(Qwen3ForCausalLM(config), path)


def write_llama(path: Path, tied: bool = False, **sizes: object) -> PreTrainedModel:
    """Float32 Llama with "llama3" rope scaling that bites within the first tokens."""
    config = LlamaConfig(**{**_SIZES, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "rope_parameters": LLAMA3_ROPE, **sizes})
    return _write(LlamaForCausalLM(config), path)


def _write(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.08 * noise)
    model.float().save_pretrained(path)
    return model
