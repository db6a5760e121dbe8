"""Configs from files and the command line: `@ a.toml @ b.toml --trainer.optim.lr 1e-5`.

defaults < files left to right < `--dotted.key value`. Tables merge, lists are replaced whole, `-` and `_` are the same
in keys, and a number addresses one element of a list: `--train.source.0.group-size 4`. All problems are found before
any is reported, each under its full dotted key.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from megatron_rl.config.base import ConfigError, Table
from megatron_rl.config.schema import field_at, members, nearest, rows_of, table_of

T = TypeVar("T", bound=Table)

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Invocation(Generic[T]):
    """A command line, understood."""

    config: T
    dry_run: bool = False


def load(table: type[T], arguments: Sequence[str]) -> Invocation[T]:
    """The config that `arguments` describe. ConfigError lists every problem at once."""
    merge = _Merge(table)
    dry_run = False
    rest = list(arguments)
    overrides: list[tuple[str, Any]] = []
    while rest:
        word = rest.pop(0)
        if word in ("@", "--config"):
            if not rest:
                merge.problems.append(f"{word}: a file name must follow")
                break
            merge.add_file(Path(rest.pop(0)))
        elif word == "--dry-run":
            dry_run = True
        elif word.startswith("--") and len(word) > 2:
            overrides.extend(_override(table, word[2:], rest, merge.problems))
        else:
            merge.problems.append(f"{word!r}: write `@ file.toml` for a config file and `--dotted.key value` for one key")
    for dotted, value in overrides:
        nested: Any = value
        for part in reversed(dotted.split(".")):
            nested = {part: nested}
        merge.add(nested, COMMAND_LINE)
    return Invocation(merge.finish(), dry_run)


def _override(table: type[Table], word: str, rest: list[str], problems: list[str]) -> list[tuple[str, Any]]:
    """`--key value`, `--key=value`, `--flag`, `--no-flag` and the shorthands; takes the value from `rest`."""
    if word == "clean":
        return [("run.clean", True)]
    if word == "resume":
        return [("resume.enabled", True)]
    key, equals, text = word.partition("=")
    field = field_at(table, key)
    if not equals:
        if rest and rest[0] != "@" and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif field is None and key.startswith("no-") and _is_flag(field_at(table, key[3:])):
            return [(key[3:], False)]
        elif _is_flag(field):
            return [(key, True)]
        elif field is not None:
            problems.append(f"{key.replace('-', '_')}: a value must follow --{key}")
            return []
        else:
            text = "true"  # an unknown key, reported as such, or a free one below a `dict` field
    value = _literal(text, field)
    if key.replace("-", "_") == "resume.dir":
        return [("resume.enabled", True), (key, value)]
    return [(key, value)]


def _is_flag(field: Any) -> bool:
    return field is not None and bool in members(field.annotation)


def _literal(text: str, field: Any) -> Any:
    """A word of the command line as a value: kept as text where the field is text, else JSON, else TOML, else text."""
    kinds = [] if field is None else members(field.annotation)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if str in kinds:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # also of a number with thousands of digits
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text


@dataclass
class _Merge:
    """The values so far, where each came from, and what is wrong with them."""

    table: type[Table]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    incomplete: bool = False
    """A file has not been read, so what is missing may be in there."""

    def add_file(self, path: Path) -> None:
        try:
            text = path.read_text("utf-8-sig")
            values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            self.problems.append(f"{path}: cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            self.problems.append(f"{path}: not UTF-8 text (byte {error.start})")
        except ValueError as error:  # both decoders name line and column
            self.problems.append(f"{path}: {'JSON' if path.suffix == '.json' else 'TOML'} syntax: {error}")
        except RecursionError:
            self.problems.append(f"{path}: nested too deeply")
        else:
            if isinstance(values, dict):
                self.add(values, str(path))
                return
            self.problems.append(f"{path}: holds a {type(values).__name__}, a config is a table of keys")
        self.incomplete = True

    def add(self, values: dict[str, Any], origin: str) -> None:
        self._merge(self.values, self._known(self.table, values, "", origin))

    def _known(self, table: type[Table], values: dict[str, Any], path: str, origin: str) -> dict[str, Any]:
        """`values` with its keys spelled as the fields are; unknown ones are reported and left out."""
        out: dict[str, Any] = {}
        for given, value in values.items():
            key = given.replace("-", "_")
            dotted = f"{path}.{key}" if path else key
            if key not in table.model_fields:
                self.problems.append(f"{dotted}: unknown key ({origin}); {nearest(self.table, table, path, key)}")
                continue
            if key in out:
                self.problems.append(f"{dotted}: given with - and with _ ({origin}); keep one")
            annotation = table.model_fields[key].annotation
            inner, rows = table_of(annotation), rows_of(annotation)
            if inner is not None and isinstance(value, dict):
                value = self._known(inner, value, dotted, origin)
            elif rows is not None and isinstance(value, list):
                value = [self._known(rows, row, f"{dotted}.{i}", origin) if isinstance(row, dict) else row for i, row in enumerate(value)]
            elif rows is not None and _numbered(value):
                value = {i: self._known(rows, row, f"{dotted}.{i}", origin) if isinstance(row, dict) else row for i, row in value.items()}
            out[key] = value
            self.origins[dotted] = origin
        return out

    def _merge(self, into: dict[str, Any], values: dict[str, Any], path: str = "") -> None:
        """Tables merge, numbered elements merge into their list, anything else replaces."""
        for key, value in values.items():
            old = into.get(key)
            dotted = f"{path}.{key}" if path else key
            if isinstance(old, dict) and isinstance(value, dict):
                self._merge(old, value, dotted)
            elif isinstance(old, list) and _numbered(value):
                for i, element in value.items():
                    if int(i) >= len(old):
                        self.problems.append(f"{dotted}.{i}: {dotted} has {len(old)} elements, numbered from 0")
                    elif isinstance(old[int(i)], dict) and isinstance(element, dict):
                        self._merge(old[int(i)], element, f"{dotted}.{i}")
                    else:
                        old[int(i)] = element
            else:
                into[key] = value

    def finish(self) -> Any:
        """The config, or a ConfigError of all problems."""
        config = None
        if not self.values and not self.problems:
            raise ConfigError("no config given: name its file, as in `@ examples/reverse_text/rl.toml` (--help lists every key)")
        mistyped = dict(_mistyped(self.table, self.values))
        self.problems.extend(f"{dotted} = {what}{self._origin(dotted)}" for dotted, what in mistyped.items())
        try:
            config = self.table.model_validate(with_defaults(self.table, self.values))
        except ValidationError as errors:
            found = [(".".join(str(part) for part in error["loc"]), error) for error in errors.errors(include_url=False)]
            found = [
                (dotted, error)
                for dotted, error in found
                if dotted not in mistyped and not (self.incomplete and error["type"] == "missing")
            ]
            self.problems.extend(self._sentence(dotted, error) for dotted, error in found)
        if self.problems:
            raise ConfigError(*dict.fromkeys(self.problems))
        return config

    def _origin(self, dotted: str) -> str:
        """Where the key, or the nearest table above it, was given: " (a.toml)"."""
        while dotted and dotted not in self.origins:
            dotted = dotted.rpartition(".")[0]
        return f" ({self.origins[dotted]})" if dotted else ""

    def _sentence(self, dotted: str, error: Any) -> str:
        """One problem found by pydantic, as `dotted.key = value: what (origin)`."""
        message = str(error["msg"]).removeprefix("Value error, ")
        if error["type"] == "missing":
            return f"{dotted}: required, and not given"
        if error["type"] == "value_error":  # our own sentences name the value themselves
            return f"{dotted}: {message}{self._origin(dotted)}" if dotted else message
        message = message.replace("Input should", "must").replace("String should", "must").replace("List should", "must")
        return f"{dotted} = {json.dumps(error['input'], default=str)}: {message}{self._origin(dotted)}"


def with_defaults(table: type[Table], values: dict[str, Any]) -> dict[str, Any]:
    """Tables given in part keep what their place has by default: `[eval.sampling] max_tokens = 8` leaves its temperature at 0."""
    out = dict(values)
    for name, info in table.model_fields.items():
        inner, given = table_of(info.annotation), values.get(name)
        if inner is not None and isinstance(given, dict):
            default = info.get_default(call_default_factory=True)
            base = default.model_dump(exclude_unset=True) if isinstance(default, Table) else {}
            out[name] = {**base, **with_defaults(inner, given)}
    return out


def _numbered(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(key.isdecimal() for key in value)


def _mistyped(table: type[Table], values: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Values that pydantic would convert though they are mistakes: true for a number, "8" for 8, 1 for true."""
    words: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    for key, value in values.items():
        annotation = table.model_fields[key].annotation
        dotted = f"{path}.{key}" if path else key
        inner, rows = table_of(annotation), rows_of(annotation)
        if inner is not None and isinstance(value, dict):
            yield from _mistyped(inner, value, dotted)
        elif rows is not None and isinstance(value, list):
            for i, row in enumerate(value):
                if isinstance(row, dict):
                    yield from _mistyped(rows, row, f"{dotted}.{i}")
        else:
            kinds = [kind for kind in members(annotation) if kind in words]
            given = int if type(value) is float and value.is_integer() and float not in kinds else type(value)
            fits = given in kinds or (given is int and float in kinds)
            if kinds and given in words and not fits:
                yield dotted, f"{json.dumps(value)}: must be {' or '.join(words[kind] for kind in kinds)}"
            elif type(value) is float and not math.isfinite(value):
                yield dotted, f"{value}: must be finite"
