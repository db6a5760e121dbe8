"""What the config tables look like from outside: the field a dotted key names, and all keys with their documentation."""

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_rl.config.base import Table


@dataclass(frozen=True)
class Key:
    """One row of the reference: `trainer.optim.lr`, its type, default and docstring as text."""

    path: str
    type: str
    default: str
    doc: str


def members(annotation: Any) -> list[Any]:
    """The alternatives of a union; a list of one for anything else."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return list(get_args(annotation))
    return [annotation]


def table_of(annotation: Any) -> type[Table] | None:
    """The table a field holds, `X` or `X | None`; None when it holds no table."""
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, Table):
            return member
    return None


def rows_of(annotation: Any) -> type[Table] | None:
    """The table of which a field holds a list (`[[train.source]]`)."""
    return table_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


def field_at(table: type[Table], dotted: str) -> FieldInfo | None:
    """The field that a dotted key names; None for an unknown one, and for a free key below a `dict` field."""
    field: FieldInfo | None = None
    current: type[Table] | None = table
    for part in dotted.replace("-", "_").split("."):
        if field is not None and part.isdecimal() and rows_of(field.annotation):
            current, field = rows_of(field.annotation), None
        elif current is not None and part in current.model_fields:
            field = current.model_fields[part]
            current = table_of(field.annotation)
        else:
            return None
    return field


def nearest(root: type[Table], table: type[Table], path: str, key: str) -> str:
    """The remedy for an unknown key of `table`: that very key elsewhere, else the nearest one there, else all keys there."""
    prefix = f"{path}." if path else ""
    close = [prefix + name for name in difflib.get_close_matches(key, list(table.model_fields), n=1, cutoff=0.6)]
    same = [row.path for doc in tables(root) for row in keys(doc) if row.path.rpartition(".")[2] == key][:3]
    if same or close:
        return f"did you mean {' or '.join(same or close)}?"
    return f"keys there: {', '.join(table.model_fields)}"


@dataclass(frozen=True)
class TableDoc:
    """A table at its place: ("trainer.optim", OptimConfig, the optimizer that a trainer has by default)."""

    path: str
    table: type[Table]
    defaults: Table | None = None


def tables(table: type[Table], path: str = "", defaults: Table | None = None) -> Iterator[TableDoc]:
    """Every table below `table`, itself first; of a list of tables, "train.source[]"."""
    yield TableDoc(path, table, defaults)
    for name, field in table.model_fields.items():
        below = f"{path}.{name}" if path else name
        inner, rows = table_of(field.annotation), rows_of(field.annotation)
        default = _default(field, name, defaults)
        if inner is not None:
            yield from tables(inner, below, default if isinstance(default, Table) else None)
        elif rows is not None:
            yield from tables(rows, below + "[]")


def keys(doc: TableDoc) -> list[Key]:
    """The plain keys of one table (its sub-tables have entries of their own in `tables`)."""
    out = []
    for name, field in doc.table.model_fields.items():
        if table_of(field.annotation) is None and rows_of(field.annotation) is None:
            default = "required" if field.is_required() and doc.defaults is None else default_text(_default(field, name, doc.defaults))
            path = f"{doc.path}.{name}" if doc.path else name
            out.append(Key(path, type_text(field), default, " ".join((field.description or "").split())))
    return out


def _default(field: FieldInfo, name: str, defaults: Table | None) -> Any:
    """Of a field: what its table has at its place, else what the field itself says."""
    return getattr(defaults, name) if defaults is not None else field.get_default(call_default_factory=True)


def default_text(default: Any) -> str:
    """As TOML would have it; "-" for a key that is absent by default."""
    if default is None or default is PydanticUndefined:
        return "-"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return f'"{default}"'
    return str(list(default) if isinstance(default, tuple) else default)


def type_text(field: FieldInfo) -> str:
    """`int >= 1`, `"none" | "full"`, `float (0, 1]`-like bounds spelled as comparisons."""
    names = [_name(member) for member in members(field.annotation) if member is not type(None)]
    bounds = []
    for rule in field.metadata:
        for kind, sign in ((Ge, ">="), (Gt, ">"), (Le, "<="), (Lt, "<")):
            if isinstance(rule, kind):
                bounds.append(f"{sign} {getattr(rule, kind.__name__.lower())}")
        if isinstance(rule, MinLen):
            bounds.append(f"at least {rule.min_length}")
    return " | ".join(names) + (" " + ", ".join(bounds) if bounds else "")


def _name(annotation: Any) -> str:
    if get_origin(annotation) is typing.Literal:
        return " | ".join(f'"{value}"' for value in get_args(annotation))
    if get_origin(annotation) is dict:
        return "table"
    if get_origin(annotation) in (list, tuple):
        inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
        return "[" + ", ".join(_name(argument) for argument in inner) + "]"
    return {"str": "string", "Any": "any"}.get(getattr(annotation, "__name__", ""), getattr(annotation, "__name__", str(annotation)))
