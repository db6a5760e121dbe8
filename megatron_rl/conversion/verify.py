"""Whether a conversion kept every bit: both sides are read and compared tensor by tensor."""

from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_rl.conversion.hf_model import HFModel, same_bits
from megatron_rl.conversion.passthrough import Portion, same
from megatron_rl.conversion.progress import ByteProgress

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
