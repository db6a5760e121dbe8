"""Whether a conversion kept every bit, or what a quantised format holds of it: both sides are read and compared tensor by tensor."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from torch import Tensor

from megatron_rl.conversion.hf_io import CheckpointReader, TensorSpec
from megatron_rl.conversion.hf_model import HFModel, same_bits
from megatron_rl.conversion.passthrough import Portion, same
from megatron_rl.conversion.progress import ByteProgress
from megatron_rl.conversion.quantize import Quantized, dequantize, is_quantized

if TYPE_CHECKING:
    from megatron_rl.conversion.megatron_model import MegatronModel


class VerificationFailed(Exception):
    """What was written is not what was read."""


def verify(
    source: "HFModel | MegatronModel",
    passthrough: list[Portion],
    copy: "HFModel | MegatronModel",
    copied: list[Portion],
    total: int,
    console: Console,
) -> None:
    """Raises VerificationFailed naming the first tensor whose bits differ. The two sides have the same rows."""
    with ByteProgress("verify", total, console) as progress:
        for row in source.rows:
            for (tensor, value), (_, again) in zip(source.tensors(row), copy.tensors(row), strict=True):
                if not same_bits(value, again):
                    raise VerificationFailed(f"{copy.directory}: tensor {tensor.name} differs from the one in {source.directory}")
                progress.advance(value.nbytes)
        where = dict(chain.from_iterable(((name, portion.file) for name in portion.names) for portion in copied))
        for portion in passthrough:
            if name := same(portion, where):
                raise VerificationFailed(f"{copy.directory}: tensor {name} differs from the one in {portion.file}")
            progress.advance(portion.nbytes())


def verify_quantized(quantized: Quantized, directory: Path, total: int, console: Console) -> None:
    """Raises VerificationFailed naming the first tensor of `directory` that is not the source's, or not near enough to it."""
    model, reader = quantized.model, CheckpointReader(directory)

    def read(spec: TensorSpec) -> Tensor:
        return reader.read(spec.name, spec.shape, tuple(slice(0, length) for length in spec.shape))

    with ByteProgress("verify", total, console) as progress:
        for row in model.rows:
            specs = iter(quantized.specs(row))
            for tensor, value in model.tensors(row):
                found = {"weight": read(next(specs))}
                if is_quantized(tensor):
                    for _ in range(2 if quantized.recipe == "nvfp4" else 1):
                        spec = next(specs)
                        found[spec.name.rpartition(".")[2]] = read(spec)
                    values, tolerance = dequantize(found, quantized.recipe)
                    good = bool(((values - value.float()).abs() <= tolerance).all())
                else:
                    good = same_bits(value, found["weight"])
                if not good:
                    raise VerificationFailed(f"{directory}: tensor {tensor.name} differs from the one in {model.directory}")
                progress.advance(sum(part.nbytes for part in found.values()))
        where = {name: directory / file for name, file in reader.files.items()}
        for portion in model.passthrough:
            if name := same(portion, where):
                raise VerificationFailed(f"{directory}: tensor {name} differs from the one in {portion.file}")
            progress.advance(portion.nbytes())
