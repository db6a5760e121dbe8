"""A live policy from and to HF: load by slices, export tensor by tensor, save a directory."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import INDEX
from megatron_rl.conversion.hf_io import CheckpointReader, ShardWriter, TensorSpec, plan_shards
from megatron_rl.conversion.layout import Shards
from megatron_rl.models.family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, TensorRule, tied
from megatron_rl.models.language_model import LanguageModel
from megatron_rl.models.layer_spec import FUSED_NORMS
from megatron_rl.models.policy import Policy

_SHARD_BYTES = 4 * 2**30
# Everything of an HF directory but the weights: the engine and a later run need it.
_COMPANIONS = ("*.json", "*.txt", "*.jinja", "*.model", "merges.txt", "additional_chat_templates/*.jinja")


def load_hf(policy: Policy, hf_dir: str | Path) -> None:
    """Fill the policy's weights; each rank reads only the slices it holds. float32 and bfloat16 checkpoints fit either dtype.

    Raises:
        ConfigError: a tensor is missing, unexpected or has another shape than config.json says; names the file and the tensor.
    """
    reader = CheckpointReader(hf_dir)
    _check_names(policy, reader)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for chunk in policy.chunks:
            parameters = _parameters_by_global_name(chunk)
            for rule in _stage_rules(policy, chunk, with_tied_copy=True):
                shards = Shards(rule, policy.hf_config, policy.family.dimensions(policy.hf_config), size)
                parts = [reader.read(tensor.name, shards.shape(tensor), shards.part(tensor, rank)) for tensor in rule.hf]
                parameters.pop(_live_name(rule.megatron, parameters)).copy_(shards.assemble(parts))
            if parameters:
                raise AssertionError(f"the {policy.family.name} table has no row for {sorted(parameters)}")


def export_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """HF names and whole tensors of this pipeline stage, one at a time, in the order of the forward pass.

    Collective over the tensor-parallel group; yields on its rank 0 only. Tied embeddings come once, from the first stage. Tensors have
    the model's dtype, live on its device and may be views of live weights: copy what must outlive the next step.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    for chunk in policy.chunks:
        parameters = _parameters_by_global_name(chunk)
        for rule in _stage_rules(policy, chunk):
            shards = Shards(rule, policy.hf_config, policy.family.dimensions(policy.hf_config), group.size())
            gathered = _gather(parameters[_live_name(rule.megatron, parameters)].detach(), rule, group)
            if gathered is not None:
                for tensor, value in zip(rule.hf, shards.join(gathered), strict=True):
                    yield tensor.name, value.contiguous()


def save_hf(policy: Policy, out_dir: str | Path, source_dir: str | Path) -> None:
    """Write an HF directory: sharded safetensors with index, and from `source_dir` config.json (with the dtype of the weights),
    generation config, tokenizer and chat template.

    Collective over all ranks. Written beside `out_dir` and renamed into place, replacing what was there; needs a file system that all
    ranks share.
    """
    out_dir, source_dir = Path(out_dir), Path(source_dir)
    partial = out_dir.with_name(out_dir.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _copy_companions(policy, source_dir, partial)
    dist.barrier()
    plan = plan_shards(_stage_specs(policy), _SHARD_BYTES)
    total = sum(len(shards) for shards in plan)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    before = sum(len(shards) for shards in plan[:stage])
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    # Every data and context replica holds the same weights; the first writes.
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        _write_stage(policy, partial, dict(zip(names[before:], plan[stage], strict=False)))
    dist.barrier()
    if dist.get_rank() == 0:
        shards = dict(zip(names, (shard for stage_shards in plan for shard in stage_shards), strict=True))
        weight_map = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
        size = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
        (partial / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2))
        _rename_into_place(partial, out_dir)
    dist.barrier()


def _write_stage(policy: Policy, directory: Path, shards: dict[str, list[TensorSpec]]) -> None:
    tensors = export_tensors(policy)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        for _ in tensors:
            raise AssertionError("export_tensors yields on tensor rank 0 only")
        return
    for file, specs in shards.items():
        with ShardWriter(directory / file, specs) as writer:
            for _ in specs:
                writer.write(*next(tensors))
    # A generator left before its end would leave the other tensor ranks in a gather.
    if next(tensors, None) is not None:
        raise AssertionError("more tensors than planned")


def _rename_into_place(partial: Path, out_dir: Path) -> None:
    replaced = out_dir.with_name(out_dir.name + ".old")
    shutil.rmtree(replaced, ignore_errors=True)
    if out_dir.exists():
        out_dir.rename(replaced)
    partial.rename(out_dir)
    shutil.rmtree(replaced, ignore_errors=True)
    parent = os.open(out_dir.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def _copy_companions(policy: Policy, source_dir: Path, out_dir: Path) -> None:
    for pattern in _COMPANIONS:
        for path in source_dir.glob(pattern):
            if path.name != INDEX:
                target = out_dir / path.relative_to(source_dir)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    config = {key: value for key, value in policy.hf_config.items() if key != "torch_dtype"}
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _check_names(policy: Policy, reader: CheckpointReader) -> None:
    known = {tensor.name for rule in policy.family.tensors(policy.hf_config) for tensor in rule.hf}
    ignored = {"lm_head.weight"} if tied(policy.hf_config) else set()
    for name in sorted(reader.files.keys() - known - ignored):
        if not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(
                f"{reader.directory / reader.files[name]}: unexpected tensor {name}; "
                f"config.json describes a {policy.family.name} model without it"
            )


def _stage_rules(policy: Policy, chunk: LanguageModel, with_tied_copy: bool = False) -> Iterator[TensorRule]:
    """Rows of the table whose Megatron tensor lives in this chunk; on request, the last stage's copy of a tied embedding as one more."""
    entries = {layer.layer_number - 1 for layer in chunk.decoder.layers}
    for rule in policy.family.tensors(policy.hf_config):
        if rule.megatron == EMBEDDING_WEIGHT:
            if chunk.pre_process:
                yield rule
            elif with_tied_copy and chunk.post_process and tied(policy.hf_config):
                yield TensorRule(OUTPUT_WEIGHT, rule.hf, rule.placement)
        elif rule.megatron.startswith("decoder.layers."):
            if int(rule.megatron.split(".")[2]) in entries:
                yield rule
        elif chunk.post_process:
            yield rule


def _stage_specs(policy: Policy) -> list[list[TensorSpec]]:
    """What every pipeline stage exports, known to every rank without communication."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    entries_per_stage = 2 * policy.hf_config["num_hidden_layers"] // stages
    dimensions = policy.family.dimensions(policy.hf_config)
    specs: list[list[TensorSpec]] = [[] for _ in range(stages)]
    for rule in policy.family.tensors(policy.hf_config):
        if rule.megatron.startswith("decoder.layers."):
            stage = int(rule.megatron.split(".")[2]) // entries_per_stage
        else:
            stage = 0 if rule.megatron == EMBEDDING_WEIGHT else stages - 1
        specs[stage] += [TensorSpec(tensor.name, tuple(dimensions[dim] for dim in tensor.dims), policy.dtype) for tensor in rule.hf]
    return specs


def _parameters_by_global_name(chunk: LanguageModel) -> dict[str, Tensor]:
    """Parameters by their name with the stack entry's number over the whole model (Megatron numbers modules within the stage)."""
    offset = chunk.decoder.layers[0].layer_number - 1
    parameters = {}
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            entry, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{int(entry) + offset}.{rest}"
        parameters[name] = parameter
    return parameters


def _live_name(name: str, parameters: dict[str, Tensor]) -> str:
    """The table's name, or the one under which a fused norm-and-linear keeps it."""
    if name not in parameters:
        for plain, fused in FUSED_NORMS.items():
            name = name.replace(plain, fused)
    return name


def _gather(shard: Tensor, rule: TensorRule, group: dist.ProcessGroup) -> list[Tensor] | None:
    """Every tensor rank's shard on rank 0 of the group, None elsewhere."""
    if group.size() == 1:
        return [shard]
    if rule.placement == "replicated":
        return [shard] if group.rank() == 0 else None
    gathered = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(shard.contiguous(), gathered, group=group, group_dst=0)
    return gathered
