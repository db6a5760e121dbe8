"""What would run where (`--dry-run`), and which GPUs an engine is given."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table as Grid

from megatron_rl.config.hf_directory import tensor_shapes, weight_files
from megatron_rl.config.run import EvalRunConfig, RLConfig, SftRunConfig
from megatron_rl.config.trainer import ParallelConfig, TrainerConfig
from megatron_rl.platform.stack import gpu_count

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}
WIDTH = 150


@dataclass(frozen=True)
class Placed:
    """One row: a process, when it runs, where it is found, on which device, and what decides its memory."""

    process: str
    stage: str
    place: str
    device: str
    memory: str


def show(config: RLConfig | SftRunConfig | EvalRunConfig, console: Console) -> None:
    """Print the resolved config and the placement. Touches nothing."""
    if not console.is_terminal:
        console.width = WIDTH
    console.rule("resolved config", align="left")
    text = json.dumps(config.model_dump(mode="json"), indent=2)
    console.print(Syntax(text, "json", background_color="default") if console.is_terminal else text, highlight=False, soft_wrap=True)
    console.rule("placement", align="left")
    grid = Grid("process", "stage", "place", "device", "memory", box=None, pad_edge=False)
    for row in placement(config, gpu_count()):
        grid.add_row(row.process, row.stage, row.place, row.device, row.memory)
    console.print(grid)
    console.print(f"run directory  {config.run.dir}", highlight=False, soft_wrap=True)


def placement(config: RLConfig | SftRunConfig | EvalRunConfig, gpus: int) -> Iterator[Placed]:
    """Every process that the local launcher starts for `config`."""
    if isinstance(config, SftRunConfig):
        yield from _ranks(config.trainer, "sft", config, gpus)
        return
    if isinstance(config, EvalRunConfig) or not config.trainer.replay:
        yield from _engines(config, gpus)
    if isinstance(config, EvalRunConfig):
        return
    if config.warms_up:
        yield from _ranks(config.trainer, "sft", config, gpus)
    yield from _ranks(config.trainer, "rl", config, gpus)
    if not config.trainer.replay:
        batches = "tcp, free port" if config.orchestrator.batch_transport == "zmq" else f"{config.run.dir}/exchange"
        inflight = f"{config.orchestrator.max_inflight} rollouts in flight, {config.orchestrator.batch_size} per step"
        yield Placed("orchestrator", "rl", batches, "cpu", inflight)


def engine_gpus(config: RLConfig | EvalRunConfig, gpus: int) -> list[list[int]]:
    """GPUs of each engine: those after the trainer's ranks; where there are too few, all are shared from the first on."""
    ranks = config.trainer.parallel.world_size if isinstance(config, RLConfig) else 0
    count, size = config.inference.engines, config.inference.tensor_parallel
    first = ranks if ranks + count * size <= gpus else 0
    return [[(first + i * size + j) % gpus for j in range(size)] if gpus else [] for i in range(count)]


def problems(config: RLConfig | SftRunConfig | EvalRunConfig, gpus: int) -> Iterator[str]:
    """Why the processes do not fit the GPUs of this machine."""
    ranks = 0 if isinstance(config, EvalRunConfig) else config.trainer.parallel.world_size
    if gpus and ranks > gpus:
        yield f"trainer.parallel: {ranks} ranks on a machine with {gpus} GPUs; NCCL allows one rank per GPU, use a smaller layout"
    if gpus and not isinstance(config, SftRunConfig) and config.inference.tensor_parallel > gpus:
        yield f"inference.tensor_parallel = {config.inference.tensor_parallel}: this machine has {gpus} GPUs"
    if gpus and isinstance(config, RLConfig) and not config.trainer.replay:
        shared = not {gpu for row in engine_gpus(config, gpus) for gpu in row}.isdisjoint(range(ranks))
        if (
            shared
            and not {"gpu-memory-utilization", "gpu_memory_utilization"} & set(config.inference.vllm)
            and not config.inference.kv_cache_gib
        ):
            yield (
                f"inference.kv_cache_gib: engines and trainer share the {gpus} GPU(s) here, and vLLM takes nearly all of a GPU's memory; "
                "give the size of its KV cache"
            )


def _engines(config: RLConfig | EvalRunConfig, gpus: int) -> Iterator[Placed]:
    inference, model = config.inference, config.model
    default = "sized by vLLM" if gpus else "1 GiB"
    cache = f"KV cache {f'{inference.kv_cache_gib} GiB' if inference.kv_cache_gib else default}"
    memory = f"{_weights(model.path, model.dtype, inference.tensor_parallel)}, {cache}, up to {inference.max_num_seqs} sequences"
    for i, mine in enumerate(engine_gpus(config, gpus)):
        port = str(inference.port + i) if inference.port else "(free port)"
        yield Placed(f"engine_{i}", "all", f"http://{inference.host}:{port}", _device(mine), memory)


def _ranks(trainer: TrainerConfig, stage: str, config: RLConfig | SftRunConfig, gpus: int) -> Iterator[Placed]:
    parallel = trainer.parallel
    shards = parallel.tensor_parallel * parallel.pipeline_parallel
    count = parameters(config.model.path) / shards
    state = count * (4 + 12 * shards / parallel.world_size)  # FP32 gradients; master weights and two moments sharded over replicas
    memory = (
        f"{_weights(config.model.path, config.model.dtype, shards)}, gradients + optimizer {state / GIB:.2f} GiB, micro-batch "
        f"{trainer.micro_batch_tokens} tokens, head {trainer.head_chunk_tokens} at a time, recompute {trainer.recompute}"
    )
    for rank in range(parallel.world_size):
        yield Placed(
            f"{'sft' if stage == 'sft' else 'trainer'}_{rank}", stage, coordinates(rank, parallel), _device([rank] if gpus else []), memory
        )


def coordinates(rank: int, parallel: ParallelConfig) -> str:
    """A rank's place; Megatron counts tensor, context, data, pipeline, from the fastest. Sizes of 1 are left out."""
    sizes = {
        "tensor": parallel.tensor_parallel,
        "context": parallel.context_parallel,
        "data": parallel.replicas,
        "pipeline": parallel.pipeline_parallel,
    }
    place = []
    for name, size in sizes.items():
        rank, mine = divmod(rank, size)
        if size > 1:
            place.append(f"{name} {mine}/{size}")
    return ", ".join(place) or "one rank"


def _device(gpus: list[int]) -> str:
    return f"gpu {','.join(map(str, gpus))}" if gpus else "cpu"


def parameters(path: str) -> int:
    """Number of weights of an HF directory, from the safetensors headers; 0 when they can't be read (preflight says why)."""
    try:
        return sum(math.prod(shape) for name in weight_files(Path(path)) for shape in tensor_shapes(Path(path) / name))
    except ValueError:
        return 0


def _weights(path: str, dtype: str, shards: int) -> str:
    return f"weights {parameters(path) * BYTES[dtype] / shards / GIB:.2f} GiB"
