"""What would run where: the table of `--dry-run`, and the processes the launcher then starts."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table as Grid

from megatron_rl.config.run import EvalRunConfig, RLConfig, SftRunConfig
from megatron_rl.config.trainer import TrainerConfig

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Placed:
    """One row: a process, when it runs, where it listens, on which device, and what decides its memory."""

    process: str
    stage: str
    address: str
    device: str
    memory: str


def show(config: RLConfig | SftRunConfig | EvalRunConfig, console: Console) -> None:
    """Print the resolved config and the placement. Touches nothing."""
    console.rule("resolved config", align="left")
    text = json.dumps(config.model_dump(mode="json"), indent=2)
    console.print(Syntax(text, "json", background_color="default") if console.is_terminal else text, highlight=False, soft_wrap=True)
    console.rule("placement", align="left")
    grid = Grid("process", "stage", "address", "device", "memory", box=None, pad_edge=False)
    for row in placement(config):
        grid.add_row(row.process, row.stage, row.address, row.device, row.memory)
    console.print(grid)
    console.print(f"run directory: {config.run.dir}", highlight=False, soft_wrap=True)


def placement(config: RLConfig | SftRunConfig | EvalRunConfig) -> Iterator[Placed]:
    """Every process that the local launcher starts for `config`."""
    if isinstance(config, SftRunConfig):
        yield from _ranks(config.trainer, "sft", config)
        return
    if isinstance(config, EvalRunConfig) or not config.trainer.replay:
        yield from _engines(config)
    if isinstance(config, EvalRunConfig):
        return
    if config.sft is not None and not config.resume.enabled and not config.trainer.replay:
        yield from _ranks(config.trainer, "sft", config)
    yield from _ranks(config.trainer, "rl", config)
    if not config.trainer.replay:
        batches = "tcp, free port" if config.orchestrator.batch_transport == "zmq" else f"{config.run.dir}/exchange"
        inflight = f"{config.orchestrator.max_inflight} rollouts in flight, {config.orchestrator.batch_size} per step"
        yield Placed("orchestrator", "rl", batches, "cpu", inflight)


def _engines(config: RLConfig | EvalRunConfig) -> Iterator[Placed]:
    inference, model = config.inference, config.model
    cache = (
        f"KV cache {inference.kv_cache_gib} GiB" if inference.kv_cache_gib else "KV cache 1 GiB on CPU, by gpu_memory_utilization on GPU"
    )
    for i in range(inference.engines):
        port = str(inference.port + i) if inference.port else "free port"
        first = i * inference.tensor_parallel
        gpus = ",".join(str(first + j) for j in range(inference.tensor_parallel))
        memory = f"{_weights(config.model.path, model.dtype, inference.tensor_parallel)}, {cache}, {inference.max_num_seqs} sequences"
        yield Placed(f"engine_{i}", "all", f"http://{inference.host}:{port}", f"cpu or gpu {gpus}", memory)


def _ranks(trainer: TrainerConfig, stage: str, config: RLConfig | SftRunConfig) -> Iterator[Placed]:
    parallel = trainer.parallel
    size = parallel.tensor_parallel * parallel.pipeline_parallel
    memory = (
        f"{_weights(config.model.path, config.model.dtype, size)}, {_optimizer(config.model.path, size, parallel.world_size // size)}, "
        f"micro-batch {trainer.micro_batch_tokens} tokens, head {trainer.head_chunk_tokens}, recompute {trainer.recompute}"
    )
    for rank in range(parallel.world_size):
        # Megatron's order of ranks: tensor, context, data, pipeline, from the fastest
        tensor, rest = rank % parallel.tensor_parallel, rank // parallel.tensor_parallel
        context, rest = rest % parallel.context_parallel, rest // parallel.context_parallel
        data, pipeline = rest % (parallel.data_parallel or 1), rest // (parallel.data_parallel or 1)
        place = f"rank {rank}: tensor {tensor}, context {context}, data {data}, pipeline {pipeline}"
        yield Placed(f"trainer_{rank}", stage, place, f"cpu or gpu {rank}", memory)


def parameters(path: str) -> int:
    """Number of weights of an HF directory, from the safetensors headers; 0 when there are none."""
    count = 0
    for file in Path(path).glob("*.safetensors"):
        with open(file, "rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
        for name, entry in header.items():
            size = 1
            for n in entry["shape"] if name != "__metadata__" else [0]:
                size *= n
            count += size
    return count


def _weights(path: str, dtype: str, shards: int) -> str:
    return f"weights {parameters(path) * BYTES[dtype] / shards / GIB:.2f} GiB"


def _optimizer(path: str, shards: int, replicas: int) -> str:
    """FP32 gradients whole, FP32 master weights and two moments sharded over the replicas."""
    return f"gradients and optimizer {parameters(path) / shards * (4 + 12 / replicas) / GIB:.2f} GiB"
