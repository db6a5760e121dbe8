"""[[train.source]] and [[eval.source]] -> loaded environments with everything a dispatcher needs."""

from dataclasses import dataclass
from typing import Any

from megatron_rl.config.base import ConfigError
from megatron_rl.config.sources import EvalSourcesConfig, SamplingConfig, SourceConfig, TrainSourcesConfig
from megatron_rl.envs.protocol import Environment, Task
from megatron_rl.envs.registry import environment_name, load_environment


@dataclass(frozen=True)
class Source:
    """One source, its defaults filled in. `indices`: the environment's tasks that are used (select.skip, select.limit)."""

    id: str
    env: Environment
    env_name: str
    indices: range
    shuffle: bool
    ratio: float
    group_size: int
    sampling: SamplingConfig
    timeout_s: float

    def task(self, index: int) -> Task:
        """The task, checked. ConfigError names the source, the environment and the index of one that can't be made."""
        where = f"source {self.id!r}: task {index} of env {self.env_name!r}"
        try:
            task = self.env.task(index)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise ConfigError(f"{where} can't be made: {type(error).__name__}: {error}") from error
        if not isinstance(task, Task):
            raise ConfigError(f"{where} is a {type(task).__name__}, not a megatron_rl.envs.protocol.Task")
        if not (isinstance(task.messages, list) and task.messages and all(_is_message(m) for m in task.messages)):
            raise ConfigError(f'{where}: messages must be a non-empty list of {{"role": ..., "content": ...}} of text')
        return task


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def load_sources(table: TrainSourcesConfig | EvalSourcesConfig) -> list[Source]:
    """Every source of [train] or [eval]; all problems at once in one ConfigError."""
    sources, problems = [], []
    for config in table.source:
        try:
            sources.append(_load(config, table))
        except ConfigError as error:
            problems += [f"source {config.id!r}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    return sources


def _load(config: SourceConfig, table: TrainSourcesConfig | EvalSourcesConfig) -> Source:
    env = load_environment(config.env)
    skip, limit = config.select.skip, config.select.limit
    if skip >= len(env):
        raise ConfigError(f"select.skip = {skip} leaves none of the environment's {len(env)} tasks")
    return Source(
        id=config.id,
        env=env,
        env_name=environment_name(config.env),
        indices=range(skip, len(env) if limit is None else min(len(env), skip + limit)),
        shuffle=config.select.shuffle,
        ratio=config.ratio,
        group_size=config.group_size or table.group_size,
        sampling=config.sampling or table.sampling,
        timeout_s=config.env.timeout_s,
    )
