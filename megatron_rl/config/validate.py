"""Mistakes that no single key shows: keys that contradict each other, or the files they name. Nothing is loaded or started."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.hf_directory import model_problems, read_json, tokenizer_problems
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.run import EvalRunConfig, RLConfig, SftRunConfig
from megatron_rl.config.sources import EvalSourcesConfig, SamplingConfig, SourceConfig, TrainSourcesConfig
from megatron_rl.config.trainer import ParallelConfig, SftConfig, TrainerConfig

AnyRun = RLConfig | SftRunConfig | EvalRunConfig


def problems(config: AnyRun) -> list[str]:
    """Every problem found, as lines `dotted.key = value: what is wrong; what to do`."""
    found = list(_model(config.model))
    if isinstance(config, RLConfig | SftRunConfig):
        found += _micro_batch(config.trainer, config.model)
        found += _precision(config.precision, config.model)
        if config.sft is not None:
            found += _sft(config.sft, config.trainer.parallel)
    if isinstance(config, RLConfig):
        found += _batch(config)
        found += _replay(config)
        found += _sources("train", config.train, config.model)
    if isinstance(config, RLConfig | EvalRunConfig):
        found += _sources("eval", config.eval, config.model)
    if isinstance(config, EvalRunConfig) and not config.eval.source:
        found.append("eval.source: nothing to evaluate; give at least one [[eval.source]]")
    return found


def hf_config(model: ModelConfig) -> dict[str, Any] | None:
    """The model's config.json; None when it can't be read (`problems` says why)."""
    try:
        return read_json(Path(model.path) / "config.json")
    except ValueError:
        return None


def _model(model: ModelConfig) -> Iterator[str]:
    yield from model_problems(model.path)
    if model.tokenizer is not None or Path(model.path).is_dir():
        key = "model.path" if model.tokenizer is None else "model.tokenizer"
        yield from tokenizer_problems(key, model.tokenizer_path, hf_config(model))


def _micro_batch(trainer: TrainerConfig, model: ModelConfig) -> Iterator[str]:
    if trainer.micro_batch_tokens < model.context:
        yield (
            f"trainer.micro_batch_tokens = {trainer.micro_batch_tokens}: a sample may have model.context = {model.context} tokens "
            f"and is never cut; use {model.context} or more, or a smaller context"
        )


def _precision(precision: PrecisionConfig, model: ModelConfig) -> Iterator[str]:
    if precision.recipe != "none" and model.dtype != "bfloat16":
        yield f'precision.recipe = {precision.recipe!r}: is for models in bfloat16; set model.dtype = "bfloat16", or recipe = "none"'


def _batch(config: RLConfig) -> Iterator[str]:
    size = config.orchestrator.batch_size
    for source in config.train.source:
        group = source.group_size or config.train.group_size
        if size % group:
            lower = size // group * group
            remedy = f"use {lower + group}" if lower == 0 else f"use {lower} or {lower + group}"
            yield f"orchestrator.batch_size = {size}: not a multiple of the group_size {group} of train source {source.id!r}; {remedy}"
    ranks = config.trainer.parallel.replicas
    if size < ranks:
        yield f"orchestrator.batch_size = {size}: fewer than trainer.parallel.data_parallel = {ranks}; some ranks would train nothing"
    if config.deterministic and config.orchestrator.lag:
        yield f"orchestrator.lag = {config.orchestrator.lag}: deterministic = true is synchronous; set lag = 0"


def _replay(config: RLConfig) -> Iterator[str]:
    replay = config.trainer.replay
    if replay is not None and not any(Path(replay).glob("step_*.batch")):
        yield f"trainer.replay: {replay} holds no dumped batches (step_<n>.batch); a run with dump_batches = true writes them"


def _sft(sft: SftConfig, parallel: ParallelConfig) -> Iterator[str]:
    ranks = parallel.replicas
    if sft.batch_size < ranks:
        yield f"sft.batch_size = {sft.batch_size}: fewer rows than trainer.parallel.data_parallel = {ranks}; some ranks would train nothing"
    if sft.scheduler.kind != "constant" and sft.scheduler.warmup_steps >= sft.steps:
        yield f"sft.scheduler.warmup_steps = {sft.scheduler.warmup_steps}: leaves nothing of sft.steps = {sft.steps}"


def _sources(name: str, group: TrainSourcesConfig | EvalSourcesConfig, model: ModelConfig) -> Iterator[str]:
    for i, source in enumerate(group.source):
        yield from _sampling(f"{name}.source.{i}", source, group.sampling, name, model)
        group_size, temperature = source.group_size or group.group_size, (source.sampling or group.sampling).temperature
        if name == "eval" and group_size > 1 and temperature == 0:
            yield (
                f"eval.source.{i}.group_size = {group_size}: samples at temperature 0 are all the same; "
                "set sampling.temperature above 0 for pass@k (the greedy answer is always evaluated, too)"
            )


def _sampling(key: str, source: SourceConfig, inherited: SamplingConfig, group: str, model: ModelConfig) -> Iterator[str]:
    sampling = source.sampling or inherited
    if sampling.max_tokens >= model.context:
        where = f"{key}.sampling" if source.sampling else f"{group}.sampling"
        yield (
            f"{where}.max_tokens = {sampling.max_tokens}: leaves no room for a prompt in model.context = {model.context}; "
            "lower it or raise the context"
        )
