"""Everything that can be known to be wrong before a process is started, told at once."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.config import validate
from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import text_config
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.run import EvalRunConfig, ResumeConfig, RLConfig, SftRunConfig
from megatron_rl.config.trainer import LossConfig, ParallelConfig
from megatron_rl.launch import plan, ports, run_dir
from megatron_rl.platform.stack import gpu, gpu_count
from megatron_rl.precision import check as check_recipe

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM 0.32 (v1/attention/backends/cpu_attn.py); others fail at the first token."""
SHOWN = 10
"""Bad rows of a data file that are named one by one; the rest are counted."""


def check(config: RLConfig | SftRunConfig | EvalRunConfig, ranks: int | None = None) -> None:
    """ConfigError with every problem of `config` on this machine. `ranks`: as torchrun started us. Reads only."""
    found = validate.problems(config)
    if isinstance(config, EvalRunConfig):
        found += run_dir.problems(config.run, ResumeConfig())
    else:
        found += run_dir.problems(config.run, config.resume)
        found += _model(config, config.trainer.parallel)
        found += _ranks(config.trainer.parallel, ranks)
        found += _precision(config.precision)
        found += _loss(config.trainer.loss)
        if config.sft is not None:
            found += _rows(Path(config.sft.data))
    if ranks is None:
        found += plan.problems(config, gpu_count())
    if isinstance(config, RLConfig):
        found += _advantage(config)
    if isinstance(config, RLConfig | EvalRunConfig):
        found += ports.problems(config.inference)
        found += _engine(config)
        found += _environments(config)
    if found:
        raise ConfigError(*dict.fromkeys(found))


def _model(config: RLConfig | SftRunConfig, parallel: ParallelConfig) -> list[str]:
    from megatron_rl.models import check_supported
    from megatron_rl.models.recompute import check_recompute

    hf = validate.hf_config(config.model)
    if hf is None:
        return []
    return check_supported(hf, parallel) or check_recompute(hf, config.trainer.recompute_modules)


def _engine(config: RLConfig | EvalRunConfig) -> Iterator[str]:
    """What vLLM would refuse, or fail on at its first token."""
    hf = validate.hf_config(config.model)
    if hf is None:
        return
    text = text_config(hf)
    longest, heads = text.get("max_position_embeddings"), text.get("num_attention_heads")
    if longest is not None and config.model.context > longest:
        yield f"model.context = {config.model.context}: the model's max_position_embeddings is {longest}; lower the context"
    if heads is None:
        return
    shards = config.inference.tensor_parallel
    if heads % shards:
        yield f"inference.tensor_parallel = {shards}: does not divide the model's {heads} attention heads"
    size = text.get("head_dim") or text.get("hidden_size", 0) // heads
    if not gpu_count() and size not in CPU_HEAD_SIZES:
        yield f"model.path: attention heads of size {size} do not run in vLLM's CPU engine; it has {', '.join(map(str, CPU_HEAD_SIZES))}"


def _ranks(parallel: ParallelConfig, ranks: int | None) -> Iterator[str]:
    if problem := parallel.problem_with(ranks or parallel.world_size):
        yield f"trainer.parallel: {problem}"


def _precision(precision: PrecisionConfig) -> Iterator[str]:
    device = gpu()
    problems = check_recipe(precision, device.name, device.capability) if device else check_recipe(precision, "this machine", None)
    yield from problems
    if precision.recipe != "none" and not problems and find_spec("transformer_engine") is None:
        yield f"precision.recipe = {precision.recipe!r}: needs transformer-engine, which is not installed; see the Dockerfile"


def _loss(loss: LossConfig) -> Iterator[str]:
    if loss == LossConfig():  # losses need torch, which takes seconds to import: only for what the user changed
        return
    from megatron_rl.algorithms.losses import build_loss

    try:
        build_loss(loss.name, **loss.options)
    except (ValueError, TypeError) as error:
        yield f"trainer.loss: {error}"


def _advantage(config: RLConfig) -> Iterator[str]:
    from megatron_rl.algorithms.advantages import build_advantage

    try:
        build_advantage(config.train.advantage, **config.train.advantage_options)
    except (ValueError, TypeError) as error:
        yield f"train.advantage_options: {error}"


def _environments(config: RLConfig | EvalRunConfig) -> Iterator[str]:
    """Every source's environment is loaded, and its first task made."""
    from megatron_rl.envs.sources import load_sources

    for name, group in (("train", config.train if isinstance(config, RLConfig) else None), ("eval", config.eval)):
        try:
            sources = load_sources(group) if group is not None else []
        except ConfigError as error:
            yield from (f"{name}: {problem}" for problem in error.problems)
            continue
        for source in sources:
            try:
                source.task(source.indices[0])
            except ConfigError as error:
                yield from (f"{name}: {problem}" for problem in error.problems)


def _rows(path: Path) -> Iterator[str]:
    from megatron_rl.trainer.conversations import row_messages, rows

    try:
        lines = rows(path)
    except OSError as error:
        yield f"sft.data: {path} cannot be read: {error.strerror}"
        return
    except UnicodeDecodeError as error:
        yield f"sft.data: {path} is not UTF-8 text (byte {error.start})"
        return
    bad = 0
    for number, line in lines:
        try:
            row_messages(json.loads(line))
        except (ValueError, RecursionError) as error:
            bad += 1
            if bad <= SHOWN:
                what = f"not JSON: {error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else error
                yield f"{path}:{number}: {what}"
    if bad > SHOWN:
        yield f"{path}: and {bad - SHOWN} more bad rows"
    if not lines:
        yield f"sft.data: {path} holds no rows"
