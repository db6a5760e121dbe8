"""Tiny HF models with random weights, written as HF directories: small enough for a test, shaped to catch layout mistakes.

No two of hidden, intermediate, queries, keys and vocabulary sizes agree, norms are not all ones, and the vocabulary is odd.
"""

from pathlib import Path

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 4,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}
"""Stretches only the slower of a few frequencies, and scales attention logits."""
_LATENT = {
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}


def write_qwen3(path: Path, tied: bool, **sizes: object) -> PreTrainedModel:
    """Float32 Qwen3 with head_dim 16 (so queries are wider than hidden)."""
    config = Qwen3Config(**{**_SIZES, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied, **sizes})
    return _write(Qwen3ForCausalLM(config), path)


def write_llama(path: Path, tied: bool = False, **sizes: object) -> PreTrainedModel:
    """Float32 Llama with "llama3" rope scaling that bites within the first tokens."""
    config = LlamaConfig(**{**_SIZES, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "rope_parameters": LLAMA3_ROPE, **sizes})
    return _write(LlamaForCausalLM(config), path)


def write_qwen3_moe(path: Path, tied: bool = False, **sizes: object) -> PreTrainedModel:
    """Float32 Qwen3-MoE: 8 experts of which 2 take a token; block 1 is dense."""
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**{**_SIZES, **moe, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied, **sizes})
    return _write(Qwen3MoeForCausalLM(config), path)


def write_glm4_moe(path: Path, tied: bool = False, **sizes: object) -> PreTrainedModel:
    """Float32 GLM-4.5: half of a head is rotated, QKV biases, QK norms, the first block dense, a shared expert, a scaled sigmoid router
    whose biases move its choices."""
    moe = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    }
    config = Glm4MoeConfig(**{**_SIZES, **moe, "head_dim": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied, **sizes})
    return _write(Glm4MoeForCausalLM(config), path)


def write_deepseek_v3(path: Path, **sizes: object) -> PreTrainedModel:
    """Float32 DeepSeek-V3: low-rank queries, every part of a head has another width, the first block is dense, one of two groups of
    experts is taken."""
    config = DeepseekV3Config(**{**_SIZES, **_LATENT, **_GROUPED, "first_k_dense_replace": 1, "n_shared_experts": 2, **sizes})
    return _write(DeepseekV3ForCausalLM(config), path)


def write_deepseek_v3_yarn(path: Path) -> PreTrainedModel:
    """What `write_deepseek_v3` leaves out: YaRN, queries without a latent, rotary pairs made of halves; no experts."""
    return write_deepseek_v3(path, q_lora_rank=None, rope_interleave=False, rope_parameters=YARN_ROPE, first_k_dense_replace=4)


def write_glm_moe_dsa(path: Path, **sizes: object) -> PreTrainedModel:
    """Float32 GLM-5: a query sees 6 keys of its document at most, blocks 1 and 3 take the choice of the block before, the first block is
    dense. Indexer scores are far enough apart for the choice not to depend on rounding (test_latent_attention.py)."""
    indexer = {"index_topk": 6, "index_n_heads": 8, "index_head_dim": 16, "indexer_types": ["full", "shared", "full", "shared"]}
    experts = {**_GROUPED, "n_group": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_shared_experts": 1}
    return _write(GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**_SIZES, **_LATENT, **experts, **indexer, **sizes})), path)


FAMILIES = {
    "llama": write_llama,
    "qwen3": lambda path: write_qwen3(path, tied=False),
    "qwen3_moe": write_qwen3_moe,
    "glm4_moe": write_glm4_moe,
    "deepseek_v3": write_deepseek_v3,
    "glm_moe_dsa": write_glm_moe_dsa,
}
"""Family -> what writes a tiny model of it; a new family is one more row."""
VARIANTS = {"qwen3_tied": lambda path: write_qwen3(path, tied=True), "deepseek_v3_yarn": write_deepseek_v3_yarn}
MOE = ("qwen3_moe", "glm4_moe", "deepseek_v3", "glm_moe_dsa")


def _write(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.08 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.float().save_pretrained(path)
    return model
