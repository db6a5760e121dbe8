"""The known model families, and what of an HF config and a parallel layout they can run. No torch import."""

import json
from pathlib import Path

from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import read_json
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.models import deepseek_v3, glm4_moe, glm_moe_dsa, llama, moe, qwen3, qwen3_moe, rope
from megatron_rl.models.family import Family, HFConfig, key_value_heads, padded_vocab
from megatron_rl.models.layers.head_exchange import head_problem

FAMILIES = (qwen3.FAMILY, llama.FAMILY, qwen3_moe.FAMILY, glm4_moe.FAMILY, deepseek_v3.FAMILY, glm_moe_dsa.FAMILY)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Without any of these a config says nothing; nothing in the weights shows what rms_norm_eps was."""


def read_hf_config(hf_dir: str | Path) -> HFConfig:
    """config.json of an HF directory.

    Raises:
        ConfigError: it is not there, or no JSON object.
    """
    try:
        return read_json(Path(hf_dir) / "config.json")
    except ValueError as error:
        raise ConfigError(f"{error}; give a Hugging Face model directory") from None


def presets() -> dict[str, HFConfig]:
    """config.json of published models, by name: what sets shapes and arithmetic, no tokenizer ids."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "presets").glob("*.json"))}


def family_of(hf: HFConfig) -> Family:
    """The family that reads this config.

    Raises:
        ConfigError: none does.
    """
    architectures = hf.get("architectures") or []
    for family in FAMILIES:
        if isinstance(architectures, list) and any(name in family.architectures for name in architectures):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ConfigError(f"config.json: architectures = {architectures} is not supported; supported: {known}")


def check_supported(hf_config: HFConfig, parallel: ParallelConfig) -> list[str]:
    """Why this model cannot run in this layout: one line per problem, with the remedy; empty when it can."""
    try:
        family = family_of(hf_config)
    except ConfigError as error:
        return error.problems
    missing = [*_check_number(hf_config, "rms_norm_eps", float)]
    for field in _SIZES:
        missing += _check_number(hf_config, field, int)
    if missing:
        return missing
    problems = [*family.check(hf_config), *rope.check(hf_config, family.rope_kinds)]
    if hf_config.get("quantization_config"):
        problems.insert(0, "config.json: quantization_config: only float32 and bfloat16 weights can be trained")
    layout = _check_layout(hf_config, parallel)
    # The number and sizes of experts are known once the family has nothing to say, and where the pipeline is cut once it fits.
    experts = [] if problems else _check_experts(family, hf_config, parallel)
    own = [] if problems or layout else family.check_layout(hf_config, parallel)
    return [*problems, *layout, *experts, *own]


def _check_number(hf: HFConfig, field: str, kind: type) -> list[str]:
    if hf.get(field) is None:
        return [f"config.json: {field!r} is missing"]
    if type(hf[field]) is not kind or hf[field] <= 0:
        return [f"config.json: {field!r} = {hf[field]!r} is no {kind.__name__} above 0"]
    return []


def _check_layout(hf: HFConfig, parallel: ParallelConfig) -> list[str]:
    tensor = parallel.tensor_parallel
    divisible = [
        ("tensor_parallel", tensor, "attention heads", hf["num_attention_heads"]),
        ("tensor_parallel", tensor, "key-value heads", key_value_heads(hf)),
        ("tensor_parallel", tensor, "MLP columns (intermediate_size)", hf["intermediate_size"]),
    ]
    problems = [_does_not_divide(*row) for row in divisible if row[3] % row[1]]
    problems += _check_pipeline(hf["num_hidden_layers"], parallel)
    rows = padded_vocab(hf, tensor) // tensor
    if (tensor - 1) * rows >= hf["vocab_size"]:
        problems.append(
            f"[trainer.parallel] tensor_parallel = {tensor} leaves the last rank no row of a vocabulary of {hf['vocab_size']}; lower it"
        )
    heads, groups = hf["num_attention_heads"], key_value_heads(hf)
    if parallel.context_parallel_kind == "ulysses" and not (heads % tensor or groups % tensor):
        problem = head_problem(heads // tensor, groups // tensor, parallel.context_parallel)
        problems += [problem] if problem else []
    return problems


def _check_pipeline(layers: int, parallel: ParallelConfig) -> list[str]:
    pipeline, virtual, sizes = parallel.pipeline_parallel, parallel.virtual_pipeline_parallel, parallel.pipeline_layers
    if virtual > 1 and pipeline == 1:
        return ["[trainer.parallel] virtual_pipeline_parallel needs pipeline_parallel of 2 or more; leave it out"]
    if sizes is not None:
        if (len(sizes), sum(sizes)) == (parallel.chunks, layers) and min(sizes) > 0:
            return []
        return [
            f"[trainer.parallel] pipeline_layers names {sum(sizes)} layers in {len(sizes)} chunks; the model has {layers} layers, "
            f"pipeline_parallel x virtual_pipeline_parallel makes {parallel.chunks} chunks, and each needs a layer"
        ]
    uneven = "; or say in pipeline_layers how many layers each chunk has"
    if layers % pipeline:
        return [_does_not_divide("pipeline_parallel", pipeline, "layers", layers) + uneven]
    if layers % parallel.chunks:
        return [_does_not_divide("virtual_pipeline_parallel", virtual, "layers of a stage", layers // pipeline) + uneven]
    return []


def _check_experts(family: Family, hf: HFConfig, parallel: ParallelConfig) -> list[str]:
    if not family.has_experts(hf):
        return [
            f"[trainer.parallel] {field} = {size}, but the model has no experts; leave it out"
            for field, size in (("expert_parallel", parallel.expert_parallel), ("expert_tensor_parallel", parallel.expert_tensor_parallel))
            if size not in (None, 1)
        ]
    tensor = parallel.expert_tensor_parallel or parallel.tensor_parallel
    divisible = [
        ("expert_parallel", parallel.expert_parallel, "experts", moe.experts(hf)),
        ("expert_tensor_parallel", tensor, "expert columns (moe_intermediate_size)", hf["moe_intermediate_size"]),
        ("tensor_parallel", parallel.tensor_parallel, "shared-expert columns", moe.shared_inner(hf)),
    ]
    return [_does_not_divide(*row) for row in divisible if row[3] % row[1]]


def _does_not_divide(field: str, size: int, what: str, count: int) -> str:
    return f"[trainer.parallel] {field} = {size} does not divide the model's {count} {what}; choose one of {_divisors(count)}"


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and n <= 64)
