"""Megatron's AdamW (FP32 master weights, states sharded over data parallel) behind three verbs."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_rl import platform
from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import OptimConfig, SchedulerConfig
from megatron_rl.models.policy import Policy
from megatron_rl.trainer.schedule import learning_rate


class Optimizer:
    """Wraps the policy's chunks for gradient reduction (`.chunks`) and steps them."""

    def __init__(self, policy: Policy, config: OptimConfig, scheduler: SchedulerConfig, steps: int, offload: bool = False) -> None:
        self.config, self.scheduler, self.steps = config, scheduler, steps
        self.trains_routers = policy.trains_routers
        host = platform.optimizer_offload() if offload else {}
        if host and policy.dtype is torch.float32:
            raise ConfigError("trainer.offload_optimizer = true: Megatron's hybrid optimizer needs model.dtype = 'bfloat16'")
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunks = [DistributedDataParallel(policy.config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(policy.chunks)]
        # the loss carries global denominators already: no division by token counts here
        policy.config.finalize_model_grads_func = lambda chunks, _tokens, **kw: finalize_model_grads(chunks, None, **kw)
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=0.0,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                weight_decay=config.weight_decay,
                clip_grad=config.clip_grad,
                bf16=policy.config.bf16,
                params_dtype=policy.config.params_dtype,
                use_distributed_optimizer=True,
                **host,
            ),
            self.chunks,
        )

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def gradient_norm(self) -> float:
        """Global L2 norm of the reduced gradients, the same on every rank."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def step(self, step: int, gradient_norm: float) -> float:
        """Clip to clip_grad and apply; `gradient_norm` is finite. Returns the learning rate used at `step` (1-based)."""
        lr = learning_rate(step, self.config.lr, self.scheduler, self.steps)
        for group in self.megatron.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        if self.config.clip_grad > 0:
            decoupled = self.megatron.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(self.megatron.get_parameters(), self.config.clip_grad, gradient_norm, decoupled)
        self.megatron.step_with_ready_grads()
        return lr
