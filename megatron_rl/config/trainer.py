"""The trainer: parallel layout, optimizer, schedule, loss, checkpoints."""

import bisect
import itertools
import math
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from megatron_rl.config.base import Table


class ParallelConfig(Table):
    """[trainer.parallel] Sizes of Megatron's process groups; data_parallel is derived from the number of ranks."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share every matrix; above 1 activations between layers are split by tokens (sequence parallel)."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Stages of consecutive layers."""
    virtual_pipeline_parallel: int = Field(default=1, ge=1)
    """Layer chunks of each stage (interleaved schedule, smaller bubble)."""
    pipeline_layers: tuple[int, ...] | None = None
    """Layers of every chunk, in the model's order, where they are not to be alike ([31, 30]); chunk c belongs to stage c % stages."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share the tokens of every document, load-balanced for causal attention."""
    context_parallel_kind: Literal["all_gather", "ring", "ulysses"] = "all_gather"
    """How attention sees the other ranks' tokens: keys and values gathered, passed around, or heads exchanged for tokens."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts of every MoE layer; they come out of tensor x context x data parallel."""
    expert_tensor_parallel: int | None = Field(default=None, ge=1)
    """Ranks that share every expert's matrices; absent: tensor_parallel, as in Megatron."""
    data_parallel: int | None = Field(default=None, ge=1)
    """Given: asserted against the ranks torchrun started; when we start the ranks ourselves, the number wanted (default: the fewest)."""

    @property
    def chunks(self) -> int:
        """Layer chunks of the whole pipeline."""
        return self.pipeline_parallel * self.virtual_pipeline_parallel

    def chunk_bounds(self, layers: int) -> list[int]:
        """First layer of every chunk, and `layers` at the end."""
        sizes = self.pipeline_layers or [layers // self.chunks] * self.chunks
        return [0, *itertools.accumulate(sizes)]

    def chunk_of(self, layer: int, layers: int) -> int:
        """The chunk that holds `layer` (0-based) of `layers`."""
        return bisect.bisect_right(self.chunk_bounds(layers), layer) - 1

    @property
    def model_parallel(self) -> int:
        """Ranks of one model replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def expert_ranks(self) -> int:
        """Ranks of one replica of a stage's experts."""
        return self.expert_parallel * (self.expert_tensor_parallel or self.tensor_parallel)

    @property
    def fewest_data_parallel(self) -> int:
        """The smallest data_parallel that makes room for the experts' ranks."""
        stage = self.tensor_parallel * self.context_parallel
        return math.lcm(stage, self.expert_ranks) // stage

    @property
    def replicas(self) -> int:
        """Data-parallel replicas when we start the ranks."""
        return self.data_parallel or self.fewest_data_parallel

    @property
    def world_size(self) -> int:
        """Ranks to start when torchrun did not start us."""
        return self.model_parallel * self.replicas

    def problem_with(self, ranks: int) -> str | None:
        """Why this layout does not fit a job of so many ranks, and what would."""
        replicas, rest = divmod(ranks, self.model_parallel)
        if rest or not replicas:
            return (
                f"{ranks} ranks do not divide into replicas of {self.model_parallel} (tensor x pipeline x context parallel); "
                f"start a multiple of {self.model_parallel} ranks"
            )
        if replicas % self.fewest_data_parallel:
            return (
                f"expert_parallel x expert_tensor_parallel = {self.expert_ranks} do not divide the {ranks // self.pipeline_parallel} ranks "
                f"of a stage; start a multiple of {self.model_parallel * self.fewest_data_parallel} ranks"
            )
        if self.data_parallel not in (None, replicas):
            return (
                f"data_parallel = {self.data_parallel}, but {ranks} ranks make {replicas} replicas of {self.model_parallel}; "
                f"start {self.world_size} ranks or leave data_parallel out"
            )
        return None


class MoEConfig(Table):
    """[trainer.moe] Mixture-of-experts layers; without them it says nothing."""

    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts under expert parallel."""
    train_router: bool = False
    """Train the routers' weights. Off: they stay as loaded, so that trainer and engine keep choosing the same experts."""
    aux_loss_coefficient: float = Field(default=0.0, ge=0)
    """Weight of a load-balancing loss: of every document and MoE layer (DeepSeek-V3), mean over the step's documents."""

    @model_validator(mode="after")
    def _balances_trained_routers(self) -> "MoEConfig":
        if self.aux_loss_coefficient and not self.train_router:
            raise ValueError(f"aux_loss_coefficient = {self.aux_loss_coefficient} trains routers that are frozen; set train_router = true")
        return self


class OptimConfig(Table):
    """[trainer.optim] AdamW through Megatron's optimizer (FP32 master weights; states sharded over data parallel)."""

    lr: float = Field(default=1e-6, gt=0)
    """Highest learning rate of the schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; not on norms and biases."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off (the norm is still reported)."""

    @model_validator(mode="after")
    def _betas_decay(self) -> "OptimConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)}: each must be at least 0 and less than 1")
        return self


class SchedulerConfig(Table):
    """[trainer.scheduler] Learning rate over steps: linear warm-up, then constant, or decay to lr * min_ratio at the last step."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up, the first at lr / warmup_steps."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate of the last step, as a share of lr."""


class LossConfig(Table):
    """[trainer.loss] One of megatron_rl.algorithms.losses, with its options: `name = "ipo"`, `options = {eps = 0.3}`."""

    name: str = "ipo"
    options: dict[str, Any] = {}


class CheckpointConfig(Table):
    """[trainer.checkpoint]"""

    interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; absent: only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """Older complete checkpoints are deleted once a newer one is complete."""


RecomputeModule = Literal["core_attn", "mlp", "moe", "shared_experts"]
"""Megatron's names."""


class TrainerConfig(Table):
    """[trainer]"""

    parallel: ParallelConfig = ParallelConfig()
    moe: MoEConfig = MoEConfig()
    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    steps: int = Field(default=100, ge=1)
    """Optimizer steps of RL."""
    micro_batch_tokens: int = Field(default=4096, ge=2)
    """Capacity of one packed micro-batch; a single sample may not be longer."""
    head_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at a time in the log-prob head."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activation recomputation: of whole blocks, or of `recompute_modules`."""
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """With recompute = "selective": attention without its linears, dense MLPs, whole MoE layers, shared experts."""
    offload_activations: bool = False
    """Keep what the backward pass needs in host memory."""
    offload_optimizer: bool = False
    """Keep the optimizer's states in host memory and step there (Megatron's hybrid optimizer). On a CPU machine they are there anyway."""
    replay: str | None = None
    """Directory of dumped batches (`runs/<name>/batches`): train on them instead of on live rollouts, without an engine."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of one rank; default: cores / ranks on this machine."""
    collective_timeout_s: float = Field(default=900.0, gt=0)
    """A collective that takes longer is a hang: the rank dies and names it."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> "TrainerConfig":
        if self.scheduler.kind != "constant" and self.scheduler.warmup_steps >= self.steps:
            raise ValueError(f"scheduler.warmup_steps = {self.scheduler.warmup_steps} leaves nothing of steps = {self.steps}")
        return self

    @model_validator(mode="after")
    def _recompute_fits(self) -> "TrainerConfig":
        if self.recompute == "selective" and not self.recompute_modules:
            raise ValueError(f"recompute = 'selective' needs recompute_modules, some of {', '.join(get_args(RecomputeModule))}")
        if self.recompute != "selective" and self.recompute_modules:
            raise ValueError(f"recompute_modules says nothing with recompute = {self.recompute!r}; set recompute = 'selective'")
        if "moe" in self.recompute_modules and self.moe.aux_loss_coefficient:
            raise ValueError("recompute_modules: 'moe' with moe.aux_loss_coefficient is not supported; set recompute = 'full'")
        if {"moe", "shared_experts"} <= set(self.recompute_modules):
            raise ValueError("recompute_modules: 'moe' recomputes the shared experts too; leave 'shared_experts' out")
        return self

    @model_validator(mode="after")
    def _dispatcher_fits(self) -> "TrainerConfig":
        if self.moe.token_dispatcher == "allgather" and self.parallel.pipeline_parallel > 1:
            raise ValueError(
                "moe.token_dispatcher = 'allgather' needs micro-batches of one length, which pipeline_parallel has not; use 'alltoall'"
            )
        return self


class SftConfig(Table):
    """[sft] Supervised warm-up: packed conversations, loss on assistant tokens only."""

    data: str
    """JSONL; a row is {"messages": [{"role", "content"}, ...]} or {"prompt": ..., "completion": ...}."""
    steps: int = Field(default=100, ge=1)
    batch_size: int = Field(default=32, ge=1)
    """Rows per optimizer step, over all ranks."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    scheduler: SchedulerConfig = SchedulerConfig(kind="linear")
    seed: int = Field(default=0, ge=0)
    """Of the order in which rows are drawn."""
