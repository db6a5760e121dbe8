"""What a whole run is: the top-level tables of rl and sft configs."""

from pydantic import Field, model_validator

from megatron_rl.config.base import Table
from megatron_rl.config.inference import InferenceConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.orchestrator import OrchestratorConfig
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.sources import EvalSourcesConfig, TrainSourcesConfig
from megatron_rl.config.trainer import SftConfig, TrainerConfig
from megatron_rl.config.weights import WeightsConfig


class RunConfig(Table):
    """[run] Where a run lives: `<root>/<name>/`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Of the run and of its directory."""
    root: str = Field(default="runs", min_length=1)
    """Where run directories lie."""
    clean: bool = False
    """Delete what a used run directory holds (`--clean`)."""

    @property
    def dir(self) -> str:
        return f"{self.root}/{self.name}"


class ResumeConfig(Table):
    """[resume] `--resume` goes on from the last COMPLETE checkpoint; `--resume.dir DIR` from another run's."""

    enabled: bool = False
    dir: str | None = None

    @model_validator(mode="after")
    def _used(self) -> "ResumeConfig":
        if self.dir is not None and not self.enabled:
            raise ValueError(f"dir = {self.dir!r} without enabled = true would start afresh; set both, or neither")
        return self


class RLConfig(Table):
    """Everything of `megatron-rl rl`."""

    run: RunConfig
    model: ModelConfig
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    deterministic: bool = False
    """Synchronous, a seed per request, fixed submission order, no prefix cache, batches in dispatch order and kept."""
    dump_batches: bool = False
    """Keep every shipped batch under batches/ for replay (deterministic does so too)."""
    sft: SftConfig | None = None
    """Supervised warm-up before RL, while the engines start."""
    trainer: TrainerConfig = TrainerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: InferenceConfig = InferenceConfig()
    weights: WeightsConfig = WeightsConfig()
    train: TrainSourcesConfig
    eval: EvalSourcesConfig = EvalSourcesConfig()
    resume: ResumeConfig = ResumeConfig()

    @property
    def warms_up(self) -> bool:
        """Whether RL starts from the sft stage's export; else from model.path, or from the checkpoint or dumped batches it goes on with."""
        return self.sft is not None and not self.resume.enabled and not self.trainer.replay


class SftRunConfig(Table):
    """Everything of `megatron-rl sft`."""

    run: RunConfig
    model: ModelConfig
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    sft: SftConfig
    trainer: TrainerConfig = TrainerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    resume: ResumeConfig = ResumeConfig()


class EvalRunConfig(Table):
    """Everything of `megatron-rl eval`."""

    run: RunConfig
    model: ModelConfig
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    inference: InferenceConfig = InferenceConfig()
    eval: EvalSourcesConfig
