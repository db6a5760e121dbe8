"""What `megatron-rl parity` compares, and on which layout. Every key is a word of the command line."""

from typing import Literal

from pydantic import Field, ValidationError, model_validator

from megatron_rl.config.trainer import MoEConfig, ParallelConfig, TrainerConfig


class ParityConfig(ParallelConfig):
    """A layout, the model that is built on it, and the bounds of what may differ."""

    model: str
    """HF directory: config.json and safetensors weights; a tokenizer is not needed."""
    packed: bool = False
    """Several ragged documents per micro-batch instead of one."""
    tokens: int = Field(default=64, ge=8)
    """Of a micro-batch, rounded up to what the layout divides; there are two per replica, or as many as pipeline stages."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of our side; transformers always computes in float32. bfloat16 needs bounds of your own (atol and rtol)."""
    recompute: Literal["none", "full"] = "none"
    """Activation recomputation."""
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts under expert parallel."""
    steps: int = Field(default=0, ge=0)
    """Steps of plain SGD after which the parameters are compared, too."""
    step_size: float = Field(default=0.01, gt=0)
    """How far the first of them moves the element with the largest gradient: the learning rate is step_size / that gradient."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Of the token ids and of the lengths of packed documents."""
    atol: float | None = Field(default=None, gt=0)
    """Largest absolute difference of log-probs, entropies and losses (default: 1e-4); a tenth of it, of parameters after `steps`."""
    rtol: float | None = Field(default=None, gt=0)
    """Largest difference of a gradient, relative to the tensor's largest element (default: 1e-4)."""

    def trainer(self) -> TrainerConfig:
        """The trainer's settings for this; routers are trained, so that their gradients are compared."""
        layout = ParallelConfig(**self.model_dump(include=set(ParallelConfig.model_fields)))
        moe = MoEConfig(token_dispatcher=self.token_dispatcher, train_router=True)
        return TrainerConfig(parallel=layout, moe=moe, recompute=self.recompute)

    @property
    def bounds(self) -> tuple[float, float]:
        """(atol, rtol)"""
        return self.atol or 1e-4, self.rtol or 1e-4

    @model_validator(mode="after")
    def _bounds_are_known(self) -> "ParityConfig":
        if self.dtype == "bfloat16" and None in (self.atol, self.rtol):
            raise ValueError("dtype = 'bfloat16' has no default bounds: give atol and rtol")
        return self

    @model_validator(mode="after")
    def _trainer_takes_it(self) -> "ParityConfig":
        try:
            self.trainer()
        except ValidationError as error:
            raise ValueError("; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())) from None
        return self
