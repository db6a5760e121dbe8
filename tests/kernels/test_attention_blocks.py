"""Attention by blocks of keys: merged, it is attention over all of them; the blocks' gradients are shares of the whole gradient."""

import pytest
import torch
from megatron_rl.kernels.attention.reference import QUERY_ROWS, block_backward, block_forward, merge

SCALE = 0.3


def _whole(query, key, value, grad, causal):
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    q, k, v = leaves
    copies = q.shape[1] // k.shape[1]
    scores = SCALE * torch.einsum("nhsd,nhkd->nhsk", q, k.repeat_interleave(copies, 1))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("nhsk,nhkd->nhsd", scores.softmax(-1), v.repeat_interleave(copies, 1))
    out.backward(grad)
    return out.detach(), scores.detach().logsumexp(-1), [leaf.grad for leaf in leaves]


def _inputs(queries, keys):
    generator = torch.Generator().manual_seed(queries)
    shapes = ((2, 4, queries, 6), (2, 2, keys, 6), (2, 2, keys, 3), (2, 4, queries, 3))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("length", [1, 5, QUERY_ROWS, QUERY_ROWS + 3])
def test_one_causal_block_is_causal_attention(length):
    query, key, value, grad = _inputs(length, length)
    expected_out, expected_lse, expected_grads = _whole(query, key, value, grad, causal=True)
    out, lse = block_forward(query, key, value, SCALE, causal=True)
    torch.testing.assert_close((out, lse), (expected_out, expected_lse), rtol=1e-12, atol=1e-12)
    grads = block_backward(grad, query, key, value, lse, (grad * out).sum(-1), SCALE, causal=True)
    torch.testing.assert_close(list(grads), expected_grads, rtol=1e-12, atol=1e-12)


def test_merged_blocks_are_attention_over_all_keys():
    query, key, value, grad = _inputs(7, 11)
    expected_out, expected_lse, expected_grads = _whole(query, key, value, grad, causal=False)
    blocks = [(key[:, :, part], value[:, :, part]) for part in (slice(0, 4), slice(4, 5), slice(5, 11))]
    (out, lse), *others = (block_forward(query, *block, SCALE, causal=False) for block in blocks)
    for other in others:
        merge(out, lse, *other)
    torch.testing.assert_close((out, lse), (expected_out, expected_lse), rtol=1e-12, atol=1e-12)
    delta = (grad * out).sum(-1)
    shares = [block_backward(grad, query, *block, lse, delta, SCALE, causal=False) for block in blocks]
    grads = [sum(share[0] for share in shares), *(torch.cat([share[i] for share in shares], 2) for i in (1, 2))]
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


def test_scores_far_apart_merge_without_overflow():
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([-3e3, 3e3]).view(1, 1, 2, 1)
    value = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    out, lse = block_forward(query, key[:, :, :1], value[:, :, :1], 1.0, causal=False)
    merge(out, lse, *block_forward(query, key[:, :, 1:], value[:, :, 1:], 1.0, causal=False))
    assert (out.item(), lse.item()) == (2.0, 3e3)
