"""What runs in the process of tests/te/test_te_parity.py: the same weights and tokens through torch layers and TransformerEngine layers."""

import os
from pathlib import Path
from unittest import mock

import te_extension
import te_kernels
import torch
from pretend_gpu import pretend_gpu
from te_models import WRITERS, rank_of, write
from torch import Tensor

from megatron_rl import conversion, models, platform
from megatron_rl.config.trainer import MoEConfig, ParallelConfig, TrainerConfig

LENGTHS = (30, 1, 17)


def main(args: list[str]) -> dict:
    """args: folder for the models. By model and "packed", "whole" (one document) or "recomputed": how far they are apart."""
    directories = write(Path(args[0]))
    platform.install()
    te_kernels.install(te_extension.install())
    with rank_of(ParallelConfig()):
        return {name: _model(directories[name]) for name in WRITERS}


def _model(directory: Path) -> dict:
    from megatron.core.transformer.moe import moe_utils

    plain = _build(directory)
    with pretend_gpu("H100"):
        fused, recomputed = _build(directory), _build(directory, recompute="full")
    # TE asks the environment at the first forward pass; while models are built Megatron insists that it is unset.
    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0")
    try:
        results = {}
        for case, lengths in (("whole", (sum(LENGTHS),)), ("packed", LENGTHS)):
            with mock.patch.object(moe_utils, "te_general_gemm", None):  # where Megatron can import it, its router multiplies with it
                expected = _run(plain, lengths)
            with pretend_gpu("H100"):
                results[case] = _compare(expected, _run(fused, lengths))
        with pretend_gpu("H100"):
            results["recomputed"] = _compare(_run(fused, LENGTHS), _run(recomputed, LENGTHS))
    finally:
        del os.environ["NVTE_FLASH_ATTN"], os.environ["NVTE_FUSED_ATTN"]
    return results


def _build(directory: Path, recompute: str = "none"):
    policy = models.build(directory, TrainerConfig(recompute=recompute, moe=MoEConfig(train_router=True)), "float32")
    conversion.load_hf(policy, directory)
    return policy


def _run(policy, lengths: tuple[int, ...]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by canonical name."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_rl.conversion.live import live_tensors

    generator = torch.Generator().manual_seed(1)
    tokens = sum(lengths)
    ids = torch.randint(0, policy.hf_config["vocab_size"], (1, tokens + 1), generator=generator)
    weights = torch.rand(tokens, generator=generator)
    packed = None
    if len(lengths) > 1:
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        longest = max(lengths)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model = policy.chunks[0]
    model.zero_grad(set_to_none=True)
    logprobs, _ = model(ids[:, :-1], positions, ids[:, 1:], torch.ones(1, tokens), packed)
    loss = -(logprobs * weights).sum() / weights.sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in live_tensors(policy, model).items() if p.grad is not None}
    return loss.item(), gradients


def _compare(expected: tuple[float, dict[str, Tensor]], found: tuple[float, dict[str, Tensor]]) -> dict:
    (expected_loss, expected_gradients), (loss, gradients) = expected, found
    assert gradients.keys() == expected_gradients.keys()
    assert all(gradient.norm() > 0 for name, gradient in expected_gradients.items() if ".experts." not in name)
    apart = {name: (gradients[name] - gradient).double().norm().item() for name, gradient in expected_gradients.items()}
    size = {name: gradient.double().norm().item() for name, gradient in expected_gradients.items()}
    return {
        "loss": abs(loss - expected_loss) / abs(expected_loss),
        "gradient": sum(x**2 for x in apart.values()) ** 0.5 / sum(x**2 for x in size.values()) ** 0.5,
        "tensors": {name: apart[name] / size[name] if size[name] else apart[name] for name in apart},
    }
