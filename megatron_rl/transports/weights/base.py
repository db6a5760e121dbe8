"""What a weight transport is: a sender in the trainer; the receiving half lives with the engine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class WeightTransferError(Exception):
    """One line: which version, stage and tensor (or file), and what is wrong with it.

    `tensor` is the HF name of the tensor at fault, where one is.
    """

    def __init__(self, message: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class Ranks(Protocol):
    """The part of `platform.World` that a sender needs: where this process sits in the trainer."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def pipeline_rank(self) -> int: ...
    @property
    def writes_stage(self) -> bool:
        """True on the one rank of each pipeline stage that receives the stage's full tensors."""
        ...


class WeightSender(Protocol):
    """Offers policy versions to engines. Version v = the weights after v optimizer steps."""

    def publish(self, version: int, tensors: "Iterator[tuple[str, torch.Tensor]]", world: Ranks) -> float:
        """Offer a version; collective over all trainer ranks. Returns the seconds it took.

        `tensors` yields (HF name, full tensor) on the ranks that own them and may run collectives: every rank exhausts it.
        """
        ...

    def acked(self, version: int) -> bool:
        """Whether every engine holds `version` (or the driver said so once)."""
        ...

    def prune(self) -> list[int]:
        """Delete versions that no engine can still need; returns them."""
        ...
