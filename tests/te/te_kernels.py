"""Plain torch versions of the functions of TransformerEngine's C++ module that its layers call without quantization.

With them TE's own autograd functions run on a CPU, so that what is tested is TE's Python code: which operands it saves, which gradients
it asks for, how it lays out grouped and packed tensors. Signatures and conventions are those of TE 2.20.2's pybind.cpp; what no test
needs is refused by an assertion.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_DTYPE = {"kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}


def install(extension: ModuleType) -> None:
    """Put them into the stand-in module, and into the TE modules that imported its functions by name."""
    for kernel in (
        generic_gemm,
        te_general_grouped_gemm,
        rmsnorm_fwd,
        rmsnorm_bwd,
        convert_thd_to_bshd,
        convert_bshd_to_thd,
    ):
        name = kernel.__name__
        unavailable: Callable[..., Any] = getattr(extension, name)
        setattr(extension, name, kernel)
        for module in [module for key, module in sys.modules.items() if key.startswith("transformer_engine.")]:
            if vars(module).get(name) is unavailable:
                setattr(module, name, kernel)


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, None]:
    """op(b) @ op(a) (cuBLAS counts columns first), + bias in a forward call; the bias gradient (sum of b's rows) in a backward call."""
    assert quantizer is None and not gelu and comm_overlap is None and extra_output is None and beta in (None, 0.0, 1.0)
    result = alpha * _product(a, transpose_a, b, transpose_b)
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = b.reshape(-1, b.shape[-1]).sum(0).to(bias.dtype)
        else:
            result = result + bias
    if not transpose_b:
        result = result.reshape(*b.shape[:-1], result.shape[-1])
    return _store(result, out, out_dtype, accumulate), bias_grad, None, None


def te_general_grouped_gemm(
    a: list[Tensor],
    transpose_a: bool,
    b: list[Tensor],
    transpose_b: bool,
    out: list[Tensor],
    out_dtype: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> list[Tensor]:
    """generic_gemm for each group; `single_output`: `out` is one tensor with the groups' rows one below the other."""
    outs = list(out[0].split(list(m_splits))) if single_output else out
    for a_one, b_one, out_one, bias_one in zip(a, b, outs, bias, strict=True):
        result = _product(a_one, transpose_a, b_one, transpose_b)
        if bias_one.numel():
            if grad:
                bias_one.copy_(b_one.reshape(-1, b_one.shape[-1]).sum(0))
            else:
                result = result + bias_one
        _store(result, out_one, out_dtype, accumulate)
    return bias


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, out_dtype: Any, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """(y [n, h], None, 1 / rms [n]): y = x / rms * w, w = weight (+ 1 when zero-centered), computed in float32."""
    assert quantizer is None
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(-1) + eps)
    y = x32 * inverse_rms[:, None] * (weight.float() + zero_centered)
    return _store(y, out, out_dtype, accumulate=False), None, inverse_rms


def rmsnorm_bwd(dy: Tensor, x: Tensor, inverse_rms: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of rmsnorm_fwd: with n = x / rms and d = dy * w, dx = (d - n * mean(d * n)) / rms and dweight = sum(dy * n)."""
    normed = x.float() * inverse_rms[:, None]
    dy32 = dy.float().reshape(normed.shape)
    d = dy32 * (weight.float() + zero_centered)
    dx = (d - normed * (d * normed).mean(-1, keepdim=True)) * inverse_rms[:, None]
    return dx.to(x.dtype), (dy32 * normed).sum(0).to(weight.dtype)


def convert_thd_to_bshd(packed: Tensor, cu_seqlens: Tensor, batch: int, longest: int) -> Tensor:
    """[t, h, d] -> [batch, longest, h, d]; rows after a sequence's end are zero."""
    sequences = packed.split(cu_seqlens.diff().tolist())
    assert len(sequences) == batch
    return torch.stack([F.pad(sequence, (0, 0, 0, 0, 0, longest - len(sequence))) for sequence in sequences])


def convert_bshd_to_thd(padded: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Inverse of convert_thd_to_bshd."""
    packed = torch.cat([row[:length] for row, length in zip(padded, cu_seqlens.diff().tolist(), strict=True)])
    assert len(packed) == tokens
    return packed


def _product(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> Tensor:
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    return (left.t() if transpose_b else left) @ (right.t() if transpose_a else right)


def _store(result: Tensor, out: Tensor | None, out_dtype: Any, accumulate: bool) -> Tensor:
    if out is None:
        return result if out_dtype is None else result.to(_DTYPE[out_dtype.name])
    if accumulate:
        return out.add_(result.view_as(out))
    return out.copy_(result.view_as(out))
