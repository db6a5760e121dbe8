"""What travels from the orchestrator to the trainer: training samples, packed micro-batches, the batch of a step.

On the wire and on disk: one msgpack header (versioned), then raw array buffers. Never pickle.

Every per-token stream is one row of `STREAMS`; packing, the wire and the trainer use only that table, so a new stream
is one row.
"""

from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

FORMAT = 1


@dataclass(frozen=True)
class Stream:
    """One per-token stream. Token-aligned: entry t belongs to token t itself (not to the prediction made at t)."""

    name: str
    dtype: str
    pad: float


STREAMS: tuple[Stream, ...] = (
    Stream("token_ids", "int32", 0),
    Stream("loss_mask", "bool", 0),  # tokens the policy sampled
    Stream("inference_logprobs", "float32", 0.0),  # of the sampler, at its temperature; 0 off the mask
    Stream("temperatures", "float32", 1.0),
    Stream("advantages", "float32", 0.0),
    Stream("rl_weights", "float32", 0.0),
    Stream("ce_weights", "float32", 0.0),
)
COMPONENTS = ("rl", "ce")
"""The parts of the loss: L = sum over c of sum(c) / N_c."""


@dataclass
class TrainingSample:
    """One token sequence to train on. `streams` holds arrays of shape [tokens], by the names of STREAMS.

    token_ids is required. An absent rl_weights means 1; any other absent stream means its pad value. rl_weights count on the
    loss mask only. The first token has nothing before it that predicts it: ValueError if it is to be trained on.
    """

    sample_id: str
    rollout_id: str
    streams: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        n = len(self.streams["token_ids"])
        self.streams.setdefault("rl_weights", np.ones(n))
        for row in STREAMS:
            given = self.streams.get(row.name)
            array = np.full(n, row.pad, row.dtype) if given is None else np.ascontiguousarray(given, row.dtype)
            if array.shape != (n,):
                raise ValueError(f"sample {self.sample_id}: stream {row.name} has shape {array.shape}, token_ids has ({n},)")
            self.streams[row.name] = array
        self.streams["rl_weights"] = self.streams["rl_weights"] * self.streams["loss_mask"]
        if any(self.streams[f"{component}_weights"][0] for component in COMPONENTS):
            raise ValueError(f"sample {self.sample_id}: its first token can't be trained on, nothing predicts it")

    def __len__(self) -> int:
        return len(self.streams["token_ids"])


@dataclass
class MicroBatch:
    """Samples packed one after another: streams of shape [tokens], boundaries in cu_seqlens int32 [samples + 1].

    `denominators` are those of the whole step (float64 sums of each component's weights over every token of every
    micro-batch), so the gradient does not depend on how the step was cut up.
    """

    step: int
    policy_version: int
    cu_seqlens: np.ndarray
    streams: dict[str, np.ndarray]
    denominators: dict[str, float]
    sample_ids: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return int(self.cu_seqlens[-1])

    @classmethod
    def empty(cls, step: int, policy_version: int, denominators: dict[str, float]) -> "MicroBatch":
        """One padding token that trains nothing: keeps the number of micro-batches equal over ranks."""
        return cls(
            step, policy_version, np.array([0, 1], np.int32), {row.name: np.full(1, row.pad, row.dtype) for row in STREAMS}, denominators
        )


@dataclass
class StepBatch:
    """All micro-batches of one optimizer step. Rank r of d data-parallel ranks trains micro_batches[r::d]."""

    step: int
    policy_version: int
    micro_batches: list[MicroBatch]
    metrics: dict[str, float] = field(default_factory=dict)
    """The orchestrator's numbers of this step; the trainer adds its own and writes the line."""
    orchestrator_state: bytes = b""
    """What the orchestrator needs to go on after this step; kept in the step's checkpoint."""

    def slice(self, rank: int, ranks: int) -> "StepBatch":
        """The share of data-parallel rank `rank` of `ranks`; every share has the same number of micro-batches."""
        mine = self.micro_batches[rank::ranks]
        each = -(-len(self.micro_batches) // ranks)
        like = self.micro_batches[0]
        mine = mine + [MicroBatch.empty(self.step, self.policy_version, like.denominators) for _ in range(each - len(mine))]
        return StepBatch(self.step, self.policy_version, mine, self.metrics, self.orchestrator_state)


def encode(batch: StepBatch) -> bytes:
    """StepBatch -> bytes: 4-byte header length, msgpack header, array buffers in header order."""
    buffers: list[bytes] = []

    def array(a: np.ndarray) -> list[Any]:
        buffers.append(a.tobytes())
        return [a.dtype.str, list(a.shape)]

    header = {
        "format": FORMAT,
        "step": batch.step,
        "policy_version": batch.policy_version,
        "metrics": batch.metrics,
        "orchestrator_state": batch.orchestrator_state,
        "micro_batches": [
            {
                "cu_seqlens": array(m.cu_seqlens),
                "streams": {name: array(a) for name, a in m.streams.items()},
                "denominators": m.denominators,
                "sample_ids": m.sample_ids,
            }
            for m in batch.micro_batches
        ],
    }
    head = msgpack.packb(header)
    return len(head).to_bytes(4, "little") + head + b"".join(buffers)


def decode(data: bytes) -> StepBatch:
    """Inverse of encode. ValueError for another format or bytes that do not add up."""
    size = int.from_bytes(data[:4], "little")
    header = msgpack.unpackb(data[4 : 4 + size])
    if header.get("format") != FORMAT:
        raise ValueError(f"batch format {header.get('format')}, this version reads {FORMAT}")
    offset = 4 + size

    def array(spec: list[Any]) -> np.ndarray:
        nonlocal offset
        dtype, shape = np.dtype(spec[0]), tuple(spec[1])
        count = int(np.prod(shape))
        out = np.frombuffer(data, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
        return out

    micro_batches = [
        MicroBatch(
            header["step"],
            header["policy_version"],
            array(m["cu_seqlens"]),
            {name: array(spec) for name, spec in m["streams"].items()},
            m["denominators"],
            m["sample_ids"],
        )
        for m in header["micro_batches"]
    ]
    if offset != len(data):
        raise ValueError(f"batch of step {header['step']}: {len(data)} bytes, the header describes {offset}")
    return StepBatch(header["step"], header["policy_version"], micro_batches, header["metrics"], header["orchestrator_state"])
