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

from megatron_rl import platform
from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import INDEX
from megatron_rl.conversion.checkpoint_layout import cut
from megatron_rl.conversion.companions import copy_companions, write_config
from megatron_rl.conversion.directory import unexpected
from megatron_rl.conversion.hf_io import CheckpointReader, ShardWriter, TensorSpec
from megatron_rl.conversion.layout import Shards
from megatron_rl.models.family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, TensorRule, tied
from megatron_rl.models.language_model import LanguageModel
from megatron_rl.models.naming import canonical_name, entry_of
from megatron_rl.models.policy import Policy

_SHARD_BYTES = 4 * 2**30


def load_hf(policy: Policy, hf_dir: str | Path) -> None:
    """Fill the policy's weights; each rank reads only the slices it holds. float32 and bfloat16 checkpoints fit either dtype.

    Raises:
        ConfigError: a tensor is missing, unexpected or has another shape than config.json says; names the file and the tensor.
    """
    reader = CheckpointReader(hf_dir)
    _check_names(policy, reader)
    with torch.no_grad():
        for chunk in policy.chunks:
            held = live_tensors(policy, chunk)
            for rule in _chunk_rules(policy, chunk, with_tied_copy=True):
                if (live := held.pop(rule.megatron, None)) is None:
                    continue  # another expert rank's
                group = _tensor_group(rule)
                shards = Shards(rule, policy.hf_config, policy.family.dimensions(policy.hf_config), group.size())
                parts = [reader.read(tensor.name, shards.shape(tensor), shards.part(tensor, group.rank())) for tensor in rule.hf]
                live.copy_(shards.assemble(parts))
            if held:
                raise AssertionError(f"the {policy.family.name} table has no row for {sorted(held)}")


def export_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """HF names and whole tensors of this pipeline stage, one at a time, in the order of the forward pass.

    Collective over the ranks of the stage; yields on the one that writes it (`World.writes_stage`) only. Tied embeddings come once, from
    the first stage. Tensors have the model's dtype (an expert bias float32), live on its device and may be views of live weights: copy
    what must outlive the next step.
    """
    for chunk in policy.chunks:
        held = live_tensors(policy, chunk)
        for rule in _chunk_rules(policy, chunk):
            live = held.get(rule.megatron)
            shards = Shards(rule, policy.hf_config, policy.family.dimensions(policy.hf_config), _tensor_group(rule).size())
            collected = _collect(None if live is None else live.detach(), rule, shards, policy.dtype)
            if collected is not None:
                for tensor, value in zip(rule.hf, shards.join(collected), strict=True):
                    yield tensor.name, value.contiguous()


def live_tensors(policy: Policy, chunk: LanguageModel) -> dict[str, Tensor]:
    """What of this chunk a checkpoint holds, by canonical name: parameters, and the routers' expert biases."""
    experts = (policy.config.num_moe_experts or 0) // policy.config.expert_model_parallel_size
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts
    first_entry = chunk.decoder.layers[0].layer_number - 1
    biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))
    return {canonical_name(name, first_entry, first_expert): tensor for name, tensor in (*chunk.named_parameters(), *biases)}


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
        copy_companions(source_dir, partial)
        write_config(partial, {**policy.hf_config, **policy.family.engine_config}, policy.dtype)
    dist.barrier()
    plan = [cut(specs, lambda spec: spec.nbytes, _SHARD_BYTES) for specs in _stage_specs(policy)]
    total = sum(len(shards) for shards in plan)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    before = sum(len(shards) for shards in plan[:stage])
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
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
    if dist.get_rank() != _writer():
        for _ in tensors:
            raise AssertionError("export_tensors yields on a stage's writer only")
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


def _check_names(policy: Policy, reader: CheckpointReader) -> None:
    for name in unexpected(reader.files, policy.hf_config, policy.family):
        raise ConfigError(
            f"{reader.directory / reader.files[name]}: unexpected tensor {name}; "
            f"config.json describes a {policy.family.name} model without it"
        )


def _chunk_rules(policy: Policy, chunk: LanguageModel, with_tied_copy: bool = False) -> Iterator[TensorRule]:
    """Rows of the table whose tensor lives in this chunk (of any expert rank); on request, the last stage's copy of a tied embedding
    as one more."""
    entries = {layer.layer_number - 1 for layer in chunk.decoder.layers}
    for rule in policy.family.tensors(policy.hf_config):
        if rule.megatron == EMBEDDING_WEIGHT:
            if chunk.pre_process:
                yield rule
            elif with_tied_copy and chunk.post_process and tied(policy.hf_config):
                yield TensorRule(OUTPUT_WEIGHT, rule.hf, rule.placement)
        elif (entry := entry_of(rule.megatron)) is not None:
            if entry in entries:
                yield rule
        elif chunk.post_process:
            yield rule


def _stage_specs(policy: Policy) -> list[list[TensorSpec]]:
    """What every pipeline stage exports, in its order, known to every rank without communication."""
    parallel, layers = policy.parallel, policy.hf_config["num_hidden_layers"]
    dimensions = policy.family.dimensions(policy.hf_config)
    chunks: list[list[TensorSpec]] = [[] for _ in range(parallel.chunks)]
    for rule in policy.family.tensors(policy.hf_config):
        entry = entry_of(rule.megatron)
        chunk = 0 if rule.megatron == EMBEDDING_WEIGHT else -1 if entry is None else parallel.chunk_of(entry // 2, layers)
        dtype = getattr(torch, rule.dtype) if rule.dtype else policy.dtype
        chunks[chunk] += [TensorSpec(tensor.name, tuple(dimensions[dim] for dim in tensor.dims), dtype) for tensor in rule.hf]
    stages = parallel.pipeline_parallel  # chunk c is the (c // stages)-th of stage c % stages
    return [[spec for chunk in chunks[stage::stages] for spec in chunk] for stage in range(stages)]


def _tensor_group(rule: TensorRule) -> dist.ProcessGroup:
    """The ranks over which the rule's placement splits a tensor."""
    if rule.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _writer() -> int:
    """The rank that receives this stage's tensors: first in every group but the pipeline's."""
    return dist.get_process_group_ranks(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))[0]


def _collect(live: Tensor | None, rule: TensorRule, shards: Shards, dtype: torch.dtype) -> list[Tensor] | None:
    """Every shard of a tensor, in the order of the tensor ranks (of a replicated one: one), on the writer; None elsewhere.

    The shards that count are those of the writer's own groups; other replicas hold the same.
    """
    writer = _writer()
    if rule.expert is None:
        owners = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
        first = 0
    else:
        group = dist.get_process_group_ranks(parallel_state.get_expert_tensor_and_model_parallel_group())
        experts = shards.dimensions["experts"] // parallel_state.get_expert_model_parallel_world_size()
        owners, first = group, rule.expert // experts * shards.tensor_size
    if owners[0] != writer:
        return None
    owners = owners[first : first + (1 if rule.placement == "replicated" else shards.tensor_size)]
    rank = dist.get_rank()
    if rank != writer:
        if rank in owners:
            dist.send(live.contiguous(), writer)
        return None
    collected = []
    for owner in owners:
        if owner == writer:
            collected.append(live)
        else:
            received = torch.empty(
                shards.shard_shape(), dtype=getattr(torch, rule.dtype) if rule.dtype else dtype, device=platform.device()
            )
            dist.recv(received, owner)
            collected.append(received)
    return collected
