"""What stays in the model's own type, in the trainer and in the engine.

An engine that quantises what the trainer does not (or the other way round) samples from another policy than the one being trained: vLLM's
online quantisers take every linear that they are not told to leave, Qwen3-MoE's router among them.
"""

from fnmatch import fnmatchcase

IGNORED = (
    "lm_head",
    "*embed_tokens",
    "*norm",
    "*layernorm",
    "*.mlp.gate",
    "*.shared_expert_gate",
    "*.indexer.*",
    "*.in_proj_ba",
)
"""Names of HF modules as patterns of fnmatch, which is what vLLM's quantization_config.ignore takes."""


def is_ignored(hf_tensor: str) -> bool:
    """Whether a tensor of an HF checkpoint ("model.layers.3.mlp.gate.weight") is never quantised."""
    module = hf_tensor.rpartition(".")[0]
    return any(fnmatchcase(module, pattern) for pattern in IGNORED)
