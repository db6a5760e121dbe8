"""One optimizer step, read top to bottom."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megatron_rl import platform
from megatron_rl.algorithms.losses import Loss
from megatron_rl.models.policy import Policy
from megatron_rl.platform import World
from megatron_rl.trainer.batch import ModelInputs, model_inputs, padded_tokens
from megatron_rl.trainer.loss import SUMS, Stats, objective, require_finite
from megatron_rl.trainer.optimizer import Optimizer
from megatron_rl.transports.batches.records import COMPONENTS, MicroBatch, StepBatch


def train_step(policy: Policy, optimizer: Optimizer, rl_loss: Loss, batch: StepBatch, world: World) -> dict[str, float]:
    """Train on this data-parallel rank's share of the step's batch. Returns the step's metrics, equal on every rank."""
    started = time.perf_counter()
    optimizer.zero_grad()
    weigh_balance(policy, batch, world)
    stats = forward_backward(policy, optimizer, rl_loss, batch, world)
    totals = reduce_over_ranks(stats, world)
    check_denominators(totals, batch)
    gradient_norm = optimizer.gradient_norm()
    require_finite(totals["loss"], "loss", batch.step)
    require_finite(gradient_norm, "gradient norm", batch.step)
    computed = time.perf_counter()
    lr = optimizer.step(batch.step, gradient_norm)
    return {
        **step_metrics(totals),
        **balance_metrics(policy),
        "grad_norm": gradient_norm,
        "lr": lr,
        "time/forward_backward": computed - started,
        "time/optimizer": time.perf_counter() - computed,
    }


def forward_backward(policy: Policy, optimizer: Optimizer, rl_loss: Loss, batch: StepBatch, world: World) -> list[Stats]:
    """Megatron's schedule over the micro-batches. Returns each one's sums, on the last pipeline stage only."""

    def forward(micro_batches: Iterator[ModelInputs], model: torch.nn.Module) -> tuple:
        inputs = next(micro_batches)
        temperatures, documents = inputs.targets["temperatures"][None], inputs.documents if policy.aux_loss_coefficient else None
        output = model(inputs.token_ids, inputs.position_ids, inputs.labels, temperatures, inputs.packed, documents)

        def loss(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, Stats]:
            value, stats = objective(*output, inputs, rl_loss)
            return value, torch.zeros((), dtype=torch.int, device=value.device), stats

        return output, loss

    micro_batches = pad_count(batch.micro_batches, batch, policy)
    lengths = common_lengths(micro_batches, policy, world)
    inputs = [model_inputs(m, world, tokens) for m, tokens in zip(micro_batches, lengths, strict=True)]
    iterators = [iter(inputs) for _ in optimizer.chunks]
    single = len(optimizer.chunks) == 1
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators[0] if single else iterators,
        model=optimizer.chunks[0] if single else optimizer.chunks,
        num_microbatches=len(inputs),
        seq_length=max(i.token_ids.shape[1] for i in inputs),
        micro_batch_size=1,
        forward_only=False,
    )


def weigh_balance(policy: Policy, batch: StepBatch, world: World) -> None:
    """Set the weight of each document in the routers' load-balancing loss: one over the documents of the whole step."""
    if not policy.aux_loss_coefficient:
        return
    documents = torch.tensor(sum(len(m.sample_ids) for m in batch.micro_batches), device=platform.device())
    dist.all_reduce(documents, group=parallel_state.get_data_parallel_group())
    for router in policy.routers():
        router.balance_weight, router.balance_loss = policy.aux_loss_coefficient / max(1, int(documents)), 0.0


def balance_metrics(policy: Policy) -> dict[str, float]:
    """The load-balancing loss: the sum over ranks is the one over tokens, micro-batches and layers."""
    if not policy.aux_loss_coefficient:
        return {}
    loss = torch.tensor(sum(float(router.balance_loss) for router in policy.routers()), dtype=torch.float64, device=platform.device())
    dist.all_reduce(loss)
    return {"moe/aux_loss": loss.item()}


def pad_count(micro_batches: list[MicroBatch], batch: StepBatch, policy: Policy) -> list[MicroBatch]:
    """Interleaved pipelines need a multiple of the pipeline's size; the rest are empty micro-batches."""
    if len(policy.chunks) == 1:
        return micro_batches
    missing = -len(micro_batches) % policy.config.pipeline_model_parallel_size
    return micro_batches + [MicroBatch.empty(batch.step, batch.policy_version, micro_batches[0].denominators) for _ in range(missing)]


def common_lengths(micro_batches: list[MicroBatch], policy: Policy, world: World) -> list[int | None]:
    """Tokens that each micro-batch is padded to, where more than the layout asks for it: low precision wants multiples, the all-gather
    dispatcher one length on all data-parallel ranks."""
    same = policy.config.moe_token_dispatcher_type == "allgather" and world.data_size > 1
    if not same and policy.token_alignment == 1:
        return [None] * len(micro_batches)
    lengths = torch.tensor([padded_tokens(m, world, policy.token_alignment) for m in micro_batches], device=platform.device())
    if same:
        dist.all_reduce(lengths, op=dist.ReduceOp.MAX)
    return lengths.tolist()


def reduce_over_ranks(stats: list[Stats], world: World) -> dict[str, float]:
    """Sum (and max) over micro-batches and ranks. Only the last stage's first tensor-parallel ranks have something to add."""
    counts = bool(stats) and world.is_last_stage and world.tensor_rank == 0
    zero = torch.zeros((), dtype=torch.float64, device=platform.device())
    sums = torch.stack([sum((s[name] for s in stats), zero) if counts else zero for name in SUMS])
    largest = torch.stack([max((s["logprob_diff_max"] for s in stats), default=zero) if counts else zero])
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {**dict(zip(SUMS, sums.tolist(), strict=True)), "logprob_diff_max": largest.item()}


def check_denominators(totals: dict[str, float], batch: StepBatch) -> None:
    """What the ranks really trained on must be what the packer counted: a lost or doubled micro-batch ends the run here."""
    declared = batch.micro_batches[0].denominators
    for component in COMPONENTS:
        counted = totals[f"{component}_weight"]
        expected = declared.get(component, 0.0)
        if abs(counted - expected) > 1e-6 * max(1.0, abs(expected)):
            raise RuntimeError(
                f"step {batch.step}: the ranks hold {component} weights of {counted:.6f} in sum, the batch declares {expected:.6f}: "
                f"micro-batches were lost or doubled between orchestrator and trainer"
            )


def step_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Averages over the step's tokens; what does not apply is absent."""
    metrics = {"loss/total": totals["loss"], "tokens/trained": int(totals["trained"])}
    if totals["trained"]:
        metrics["entropy/mean"] = totals["entropy"] / totals["trained"]
    if sampled := totals["sampled"]:
        metrics["mismatch_kl/mean"] = totals["k3"] / sampled
        metrics["is_masked"] = totals["is_masked"] / sampled
        metrics["logprob_diff/max"] = totals["logprob_diff_max"]
    return metrics
