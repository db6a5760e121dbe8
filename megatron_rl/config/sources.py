"""Where tasks come from: [[train.source]] and [[eval.source]] share this schema and one dispatcher."""

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_rl.config.base import Table


class SamplingConfig(Table):
    """How the engine samples. Log-probs are the processed ones: of the distribution that was sampled from."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest answer (of one turn)."""


class EnvConfig(Table):
    """An environment: a built-in by `name`, or the user's own file by `path`."""

    name: str | None = None
    """A built-in: "reasoning_gym"."""
    path: str | None = None
    """A Python file that defines `load(**options) -> Environment`."""
    options: dict[str, Any] = {}
    """Passed to the environment, which refuses what it does not know."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Of one rollout, engine time included."""

    @model_validator(mode="after")
    def _one_of(self) -> "EnvConfig":
        if (self.name is None) == (self.path is None):
            raise ValueError("give exactly one of name (a built-in environment) and path (a Python file of your own)")
        return self


class SelectConfig(Table):
    """Which tasks of the environment are used, and in which order."""

    shuffle: bool = True
    """A new order for each pass over the tasks; false: in index order."""
    skip: int = Field(default=0, ge=0)
    """Leaves out the first tasks."""
    limit: int | None = Field(default=None, ge=1)
    """Uses no more than so many tasks."""


class SourceConfig(Table):
    """One [[train.source]] or [[eval.source]]; what is absent is inherited from [train] or [eval]."""

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Names it in metrics and traces."""
    env: EnvConfig
    select: SelectConfig = SelectConfig()
    sampling: SamplingConfig | None = None
    ratio: float = Field(default=1.0, gt=0)
    """Share of the groups drawn from this source, against the other sources' ratios."""
    group_size: int | None = Field(default=None, ge=1)
    """Rollouts per task."""


class _Sources(Table):
    """What [train] and [eval] share: a source's own sampling table, given in part, keeps the rest from the group's."""

    @model_validator(mode="before")
    @classmethod
    def _inherit_sampling(cls, values: Any) -> Any:
        group = values.get("sampling", {}) if isinstance(values, dict) else None
        if not isinstance(group, dict) or not isinstance(values.get("source"), list):
            return values
        group = cls.model_fields["sampling"].default.model_dump(exclude_unset=True) | group

        def inherit(source: Any) -> Any:
            own = source.get("sampling") if isinstance(source, dict) else None
            return {**source, "sampling": group | own} if isinstance(own, dict) else source

        return {**values, "source": [inherit(source) for source in values["source"]]}


class TrainSourcesConfig(_Sources):
    """[train] Defaults for its sources, and the sources."""

    group_size: int = Field(default=8, ge=2)
    """Rollouts per task; advantages are relative to their group."""
    sampling: SamplingConfig = SamplingConfig()
    advantage: Literal["grpo"] = "grpo"
    """From megatron_rl.algorithms.advantages."""
    advantage_options: dict[str, Any] = {}
    """Of the advantage: `{std = true}` divides by the standard deviation."""
    source: list[SourceConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _trainable(self) -> "TrainSourcesConfig":
        for source in self.source:
            if (source.group_size or self.group_size) < 2:
                raise ValueError(f"source {source.id!r}: group_size 1 gives every rollout advantage 0; use 2 or more")
            if (source.sampling or self.sampling).temperature == 0:
                raise ValueError(f"source {source.id!r}: temperature 0 samples the same answer for a whole group; use a positive one")
        _unique(self.source)
        return self


class EvalSourcesConfig(_Sources):
    """[eval] Held-out tasks, evaluated before the first step, every `interval` steps, and after the last one."""

    interval: int | None = Field(default=None, ge=1)
    """Steps between evaluations; absent: only before the first step and after the last."""
    group_size: int = Field(default=1, ge=1)
    """Samples per task for pass@k, beside the greedy answer; needs a positive temperature."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    source: list[SourceConfig] = []

    @model_validator(mode="after")
    def _ids(self) -> "EvalSourcesConfig":
        _unique(self.source)
        return self


def _unique(sources: list[SourceConfig]) -> None:
    seen: set[str] = set()
    for source in sources:
        if source.id in seen:
            raise ValueError(f"two sources have the id {source.id!r}; give each its own")
        seen.add(source.id)
