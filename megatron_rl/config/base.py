"""The strict pydantic base of every config table: unknown keys fail and name the nearest known one."""

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class ConfigError(Exception):
    """The user's mistake: one or more lines, each naming the key (or file) and the remedy. Exit code 2."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class Table(BaseModel):
    """A config table. Frozen, so that what was validated is what runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        unknown = [key for key in values if key not in cls.model_fields]
        if unknown:
            raise ValueError("; ".join(unknown_key(key, cls.model_fields) for key in unknown))
        return values


def unknown_key(key: str, known: Any, what: str = "key") -> str:
    """One sentence for an unknown key (or other name, called `what`), with the nearest known one as the remedy."""
    nearest = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known {what}s: {', '.join(known)}"
    return f"unknown {what} {key!r}: {hint}"
