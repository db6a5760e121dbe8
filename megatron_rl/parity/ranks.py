"""Our side, one process per rank: Megatron's schedule over the micro-batches, plain SGD on the live parameters.

`python -m megatron_rl.parity.ranks SETTINGS.json FOLDER` with RANK and the rest in the environment. Each stage's writer holds the tensors
it gathers one part at a time (exchange.PART_BYTES).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import conversion, models, platform
from megatron_rl.config.parity import ParityConfig
from megatron_rl.parity import exchange
from megatron_rl.parity.documents import MicroBatch, micro_batches, predictions

TIMEOUT_S = 900.0
"""Of a collective: the other ranks may still be reading weights."""


def main(settings: str, folder: str) -> None:
    config, out = ParityConfig.model_validate_json(Path(settings).read_text()), Path(folder)
    platform.install()
    world = platform.initialize(config, config.seed, TIMEOUT_S)
    rank = Rank(config, world)
    reports = world.is_last_stage and world.tensor_rank == 0
    losses: list[Tensor] = []
    learning_rate = 0.0
    for step in range(max(1, config.steps)):
        outputs = rank.forward_backward()
        if reports:
            losses.append(outputs.pop("loss").sum())
        if step == 0:
            learning_rate = config.step_size / rank.largest_gradient()
            if reports:
                exchange.write(out / f"ours.outputs.{world.rank}", outputs.items())
            rank.write(out / f"ours.gradients.{world.pipeline_rank}", rank.gradients())
        if config.steps:
            rank.descend(learning_rate)
    if reports:
        exchange.write(out / f"ours.loss.{world.rank}", [("loss", torch.stack(losses))])
    if config.steps:
        rank.write(out / f"ours.parameters.{world.pipeline_rank}", rank.parameters())
    world.shutdown()


@dataclass(frozen=True)
class Share:
    """A context rank's part of one micro-batch."""

    positions: Tensor  # int64 [t]: which of the step's tokens, counted over all micro-batches
    token_ids: Tensor  # int64 [1, t]
    position_ids: Tensor  # int64 [1, t], restarting in every document
    labels: Tensor  # int64 [1, t]
    weights: Tensor  # float32 [t]: 1 / predicted tokens of the step, 0 at a document's end
    offsets: Tensor  # int32 [documents + 1], of the whole micro-batch


class Rank:
    """This rank's part of the model, its micro-batches, and what is done with them."""

    def __init__(self, config: ParityConfig, world: platform.World) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

        self.world = world
        self.policy = models.build(config.model, config.trainer(), config.dtype)
        conversion.load_hf(self.policy, config.model)
        # The loss is a sum of shares of the mean: gradients are summed and never divided.
        self.policy.config.finalize_model_grads_func = lambda chunks, _tokens, **kw: finalize_model_grads(chunks, None, **kw)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.chunks = [
            DistributedDataParallel(self.policy.config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(self.policy.chunks)
        ]
        self.shares = list(shares(micro_batches(config, self.policy.hf_config["vocab_size"]), world))
        self.frozen = self._frozen()

    def forward_backward(self) -> dict[str, Tensor]:
        """Gradients, summed over all ranks, into every parameter's main_grad. Returns what the last stage computed ({} on others):
        positions, log_probs and entropy of this rank's tokens, and each micro-batch's part of the loss."""
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        outputs: dict[str, list[Tensor]] = {"positions": [], "log_probs": [], "entropy": [], "loss": []}

        def forward(iterator: Iterator[Share], model: torch.nn.Module) -> tuple:
            share = next(iterator)
            longest = int(share.offsets.diff().max())
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=share.offsets,
                cu_seqlens_kv=share.offsets,
                cu_seqlens_q_padded=share.offsets,
                cu_seqlens_kv_padded=share.offsets,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
            temperatures = torch.ones_like(share.token_ids, dtype=torch.float32)

            def loss(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict]:
                value = -(output[0] * share.weights).sum()
                computed = (share.positions, output[0].detach(), output[1].detach(), value.detach()[None])
                for parts, tensor in zip(outputs.values(), computed, strict=True):
                    parts.append(tensor)
                return value, torch.zeros((), dtype=torch.int, device=value.device), {}

            return model(share.token_ids, share.position_ids, share.labels, temperatures, packed), loss

        iterators = [iter(self.shares) for _ in self.chunks]
        single = len(self.chunks) == 1
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=len(self.shares),
            seq_length=max(share.token_ids.shape[1] for share in self.shares),
            micro_batch_size=1,
            forward_only=False,
        )
        return {name: torch.cat(parts) for name, parts in outputs.items() if parts}

    def largest_gradient(self) -> float:
        """Largest absolute element of all gradients, over all ranks."""
        largest = torch.stack([parameter.main_grad.abs().max() for parameter in self._trained()]).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item()

    def descend(self, learning_rate: float) -> None:
        """One step of plain SGD; every replica takes the same."""
        with torch.no_grad():
            for parameter in self._trained():
                parameter.sub_(learning_rate * parameter.main_grad.to(parameter.dtype))

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Collective over the stage; HF names and gradients of the trained tensors, on the stage's writer."""
        weights = [(parameter, parameter.data) for parameter in self._trained()]
        for parameter, _ in weights:
            parameter.data = parameter.main_grad.to(parameter.dtype)
        yield from self.parameters()
        for parameter, data in weights:
            parameter.data = data

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective over the stage; HF names and values of the trained tensors, on the stage's writer."""
        return ((name, tensor) for name, tensor in conversion.export_tensors(self.policy) if name not in self.frozen)

    def write(self, path: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Collective over the stage."""
        if self.world.writes_stage:
            exchange.write(path, tensors)
        elif next(tensors, None) is not None:
            raise AssertionError("export_tensors yields on a stage's writer only")

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self.policy.chunks for parameter in chunk.parameters() if parameter.requires_grad)

    def _frozen(self) -> set[str]:
        """HF names of what this stage holds and does not train."""
        from megatron_rl.conversion.live import live_tensors

        names = {rule.megatron: rule.hf for rule in self.policy.family.tensors(self.policy.hf_config)}
        return {
            tensor.name
            for chunk in self.policy.chunks
            for megatron, live in live_tensors(self.policy, chunk).items()
            if not live.requires_grad
            for tensor in names.get(megatron, ())
        }


def shares(batches: list[MicroBatch], world: platform.World) -> Iterator[Share]:
    """This rank's parts of its replica's micro-batches."""
    from megatron_rl.models.layers.context_parallel import zigzag_indices

    weight, start = 1 / predictions(batches), 0
    for number, documents in enumerate(batches):
        offsets = np.cumsum([0, *map(len, documents)])
        if number % world.data_size == world.data_rank:
            mine = zigzag_indices(offsets, world.context_rank, world.context_size).numpy()
            streams = {
                "positions": start + np.arange(offsets[-1]),
                "token_ids": np.concatenate(documents),
                "position_ids": np.concatenate([np.arange(len(document)) for document in documents]),
                "labels": np.concatenate([np.roll(document, -1) for document in documents]),
                "weights": np.concatenate([[weight] * (len(document) - 1) + [0.0] for document in documents]).astype(np.float32),
            }
            tensors = {name: torch.from_numpy(stream[mine]).to(platform.device()) for name, stream in streams.items()}
            rows = {name: tensors[name][None] if name in ("token_ids", "position_ids", "labels") else tensors[name] for name in tensors}
            yield Share(**rows, offsets=torch.from_numpy(offsets.astype(np.int32)).to(platform.device()))
        start += offsets[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
