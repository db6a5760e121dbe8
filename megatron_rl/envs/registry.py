"""EnvConfig -> Environment: a built-in by name, or the user's own Python file."""

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.config.base import ConfigError, unknown_key
from megatron_rl.config.sources import EnvConfig
from megatron_rl.envs.protocol import Environment

BUILT_IN = {"reasoning_gym": "megatron_rl.envs.reasoning_gym"}
"""Name -> module with `load(**options) -> Environment`."""


def load_environment(config: EnvConfig) -> Environment:
    """The environment, checked to hold at least one task. ConfigError names the environment and what to change."""
    name = environment_name(config)
    if config.name is not None:
        if config.name not in BUILT_IN:
            raise ConfigError(f"env.name: {unknown_key(config.name, BUILT_IN, 'environment')}; your own file goes in env.path")
        env = importlib.import_module(BUILT_IN[config.name]).load(**config.options)
    else:
        env = _load_file(Path(config.path), config.options)
    try:
        tasks = len(env)
    except Exception as error:  # user code may raise anything
        raise ConfigError(f"environment {name!r}: its __len__ failed: {type(error).__name__}: {error}") from error
    if tasks < 1:
        raise ConfigError(f"environment {name!r} has no tasks")
    return env


def environment_name(config: EnvConfig) -> str:
    """How messages call it: the built-in's name, or the file."""
    return config.name or str(config.path)


def _load_file(path: Path, options: dict[str, Any]) -> Environment:
    if not path.is_file():
        raise ConfigError(f"env.path: {path} is not a file (it is looked up from {Path.cwd()})")
    module_name = f"{path.stem}_{xxhash.xxh3_64_hexdigest(str(path.resolve()).encode())}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"env.path: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look their module up
    try:
        spec.loader.exec_module(module)
        load = getattr(module, "load", None)
        if not callable(load):
            raise ConfigError(f"env.path: {path} defines no load(); add `def load(**options) -> Environment`")
        env = load(**options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(f"env.path: {_place(error, path)}: {type(error).__name__}: {error}") from error
    if not isinstance(env, Environment):
        what = f"the class {env.__name__}" if isinstance(env, type) else type(env).__name__
        raise ConfigError(f"env.path: load() in {path} returned {what}, not a megatron_rl.envs.protocol.Environment")
    return env


def _place(error: BaseException, path: Path) -> str:
    """file:line of the user's file where the error arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == path.resolve()]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{path}:{line}" if line else str(path)
