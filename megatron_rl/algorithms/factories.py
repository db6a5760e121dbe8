"""Losses and advantages by name, with their options."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def build(kind: str, factories: Mapping[str, Callable[..., T]], name: str, options: Mapping[str, Any]) -> T:
    """What `factories[name](**options)` makes; `kind` is how messages call it. ValueError names an unknown name or option and the known."""
    if name not in factories:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(factories))}")
    known = inspect.signature(factories[name]).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"{kind} {name!r} has no option {option!r}; it has: {', '.join(known)}")
    return factories[name](**options)
