"""Rotary frequencies and the context-parallel layout."""

import pytest
import torch
from tiny_models import LLAMA3_ROPE, YARN_ROPE
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_rl.models.layers.context_parallel import zigzag_indices
from megatron_rl.models.rope import rope


def test_zigzag_gives_each_rank_the_first_and_last_chunks_of_every_sequence():
    assert zigzag_indices([0, 4, 8], 0, 2).tolist() == [0, 3, 4, 7]
    assert zigzag_indices([0, 4, 8], 1, 2).tolist() == [1, 2, 5, 6]
    # 12 tokens over 3 ranks: 6 chunks of 2; rank 1 holds chunks 1 and 4.
    assert zigzag_indices(torch.tensor([0, 12], dtype=torch.int32), 1, 3).tolist() == [2, 3, 8, 9]


def test_one_context_rank_holds_everything_in_order():
    assert zigzag_indices([0, 3, 5], 0, 1).tolist() == [0, 1, 2, 3, 4]


def test_the_ranks_together_hold_every_token_once():
    shares = torch.cat([zigzag_indices([0, 8, 24, 32], rank, 4) for rank in range(4)])
    assert sorted(shares.tolist()) == list(range(32))


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="a sequence of 6 tokens does not divide over context_parallel = 2: pad it to a multiple of 4"):
        zigzag_indices([0, 4, 10], 0, 2)


def _transformers_frequencies(parameters, head_dim):
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, num_key_value_heads=1, rope_parameters=parameters)
    return LlamaRotaryEmbedding(config).inv_freq


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_llama3_frequencies_have_the_bits_of_transformers(head_dim):
    llama31 = LLAMA3_ROPE | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    for parameters in (LLAMA3_ROPE, llama31):
        ours = rope({"rope_parameters": parameters}).inverse_frequencies(head_dim)
        assert torch.equal(ours, _transformers_frequencies(parameters, head_dim))


def test_yarn_frequencies_have_the_bits_of_transformers():
    deepseek_v3 = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
    kimi_k2 = deepseek_v3 | {"factor": 32.0, "beta_fast": 1.0, "rope_theta": 50000.0}
    for parameters in (YARN_ROPE, deepseek_v3, kimi_k2):
        parameters = {"rope_type": "yarn", "original_max_position_embeddings": 4096} | parameters
        assert torch.equal(rope({"rope_parameters": parameters}).inverse_frequencies(64), _transformers_frequencies(parameters, 64))


def test_both_spellings_mean_the_same():
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    assert rope({"rope_parameters": LLAMA3_ROPE}) == rope({"rope_theta": 10000.0, "rope_scaling": scaling})
    assert rope({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}) == rope({"rope_theta": 1e6, "rope_scaling": None})
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert torch.equal(rope({"rope_theta": 1e6}).inverse_frequencies(64), _transformers_frequencies(plain, 64))


def test_of_both_spellings_the_one_that_transformers_takes_counts():
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LLAMA3_ROPE | {"rope_theta": 1e4}}
    taken = LlamaConfig(**both).rope_parameters
    assert taken["rope_type"] == "llama3" and rope(both) == rope({"rope_parameters": taken})
