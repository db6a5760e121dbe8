"""Presets have the sizes of the published models, built whole on the meta device."""

import math
from pathlib import Path

import pytest
from ranks import run_ranks

from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.models import check_supported, presets

PRESETS = presets()


def _latent(hidden, heads, query_rank, nope, value):
    """A block's latent attention with its norms; 512 + 64 is the latent with the rotary part."""
    queries = hidden * query_rank + query_rank + query_rank * heads * (nope + 64)
    keys_values = hidden * (512 + 64) + 512 + 512 * heads * (nope + value)
    return queries + keys_values + heads * value * hidden


def _experts(hidden, inner, experts, shared=1):
    """A block's experts, router with its bias, and shared experts."""
    return 3 * hidden * inner * (experts + shared) + hidden * experts + experts


# Embedding and output matrix, then blocks (attention, feed-forward, their two norms), then the final norm; worked out from the shapes.
SMOLLM2 = 49152 * 576 + 30 * (576 * (9 + 3 + 3) * 64 + 9 * 64 * 576 + 3 * 576 * 1536 + 2 * 576) + 576
QWEN3_06B = 151936 * 1024 + 28 * (1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024 + 2 * 128 + 3 * 1024 * 3072 + 2 * 1024) + 1024
QWEN3_30B = 2 * 151936 * 2048 + 48 * (2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048 + 2 * 128 + 2 * 2048) + 2048
QWEN3_30B += 48 * (128 * 3 * 2048 * 768 + 128 * 2048)
QWEN3_235B = 2 * 151936 * 4096 + 94 * (4096 * (64 + 4 + 4) * 128 + 64 * 128 * 4096 + 2 * 128 + 2 * 4096) + 4096
QWEN3_235B += 94 * (128 * 3 * 4096 * 1536 + 128 * 4096)
GLM_AIR = 2 * 151552 * 4096 + 46 * ((4096 + 1) * (96 + 8 + 8) * 128 + 96 * 128 * 4096 + 2 * 4096) + 4096
GLM_AIR += 3 * 4096 * 10944 + 45 * _experts(4096, 1408, 128)
DEEPSEEK_V3 = 2 * 129280 * 7168 + 61 * (_latent(7168, 128, 1536, 128, 128) + 2 * 7168) + 7168
DEEPSEEK_V3 += 3 * 3 * 7168 * 18432 + 58 * _experts(7168, 2048, 256)
KIMI_K2 = 2 * 163840 * 7168 + 61 * (_latent(7168, 64, 1536, 128, 128) + 2 * 7168) + 7168 + 3 * 7168 * 18432 + 60 * _experts(7168, 2048, 384)
INDEXER = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
GLM_5 = 2 * 154880 * 6144 + 78 * (_latent(6144, 64, 2048, 192, 256) + 2 * 6144) + 6144
GLM_5 += 3 * 3 * 6144 * 12288 + 75 * _experts(6144, 2048, 256)

# preset: (parameters from the shapes, the published number, its unit)
SIZES = {
    "smollm2-135m": (SMOLLM2, 135, 1e6),
    "qwen3-0.6b": (QWEN3_06B, 0.6, 1e9),
    "qwen3-30b-a3b": (QWEN3_30B, 30.5, 1e9),
    "qwen3-235b-a22b": (QWEN3_235B, 235, 1e9),
    "glm-4.5-air": (GLM_AIR, 107, 1e9),  # published as 106B, and as 110B with the block for multi-token prediction
    "intellect-3": (GLM_AIR, 107, 1e9),
    "deepseek-v3": (DEEPSEEK_V3, 671, 1e9),
    "kimi-k2": (KIMI_K2, 1.03, 1e12),  # 1.04T in its report, which the checkpoint's tensors do not add up to
    "glm-5": (GLM_5 + 78 * INDEXER, 744, 1e9),
    # 21 blocks choose keys: 0, 1, 2 and then every fourth.
    "glm-5.3": (GLM_5 + 21 * INDEXER, 743, 1e9),
}


@pytest.fixture(scope="module")
def shapes():
    """Of every preset, built whole on one rank."""
    return run_ranks(f"{Path(__file__).parent}/preset_cases.py:main", 1)[0]


def test_every_preset_is_expected():
    assert PRESETS.keys() == SIZES.keys()


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_runs_on_one_rank_and_in_a_layout_of_eight(name):
    assert check_supported(PRESETS[name], ParallelConfig()) == []
    experts = {"expert_parallel": 8, "expert_tensor_parallel": 1} if "moe_intermediate_size" in PRESETS[name] else {}
    tensor = math.gcd(8, PRESETS[name]["num_key_value_heads"])
    assert check_supported(PRESETS[name], ParallelConfig(tensor_parallel=tensor, **experts)) == []


@pytest.mark.ranks
@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_as_many_parameters_as_the_published_model(name, shapes):
    expected, published, unit = SIZES[name]
    assert sum(map(math.prod, shapes[name].values())) == expected
    digits = len(str(published).partition(".")[2])
    assert round(expected / unit, digits) == published
