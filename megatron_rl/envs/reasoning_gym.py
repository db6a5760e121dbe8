"""Any task of reasoning-gym as an environment, with a train / held-out split that no seed or index can cross."""

import dataclasses
import functools
import math
import re
import warnings
from decimal import Decimal
from typing import Any, Literal

import xxhash
from pydantic import Field, ValidationError, field_validator

from megatron_rl.config.base import ConfigError, Table, unknown_key
from megatron_rl.envs.protocol import Environment, Task


class Options(Table):
    """Options of the built-in environment "reasoning_gym"."""

    task: str = "spell_backward"
    """Name of a reasoning-gym task."""
    seed: int = Field(default=0, ge=0)
    size: int = Field(default=1000, ge=1, le=1_000_000)
    """Number of tasks."""
    prompt: str = "{question}"
    """The user's message; {question} is replaced."""
    scoring: Literal["exact", "score"] = "exact"
    """exact: 1 if the answer equals the task's, else 0; score: reasoning-gym's own score_answer, with partial credit."""
    answer: Literal["full", "last_number", "last_line", "tag"] = "full"
    """What of the reply is the answer; tag: inside the last <answer>...</answer>."""
    split: Literal["train", "heldout", "all"] = "train"
    heldout: float = Field(default=0.1, gt=0, lt=1)
    """Share of all questions that is held out, chosen by a hash of the case-folded question."""
    settings: dict[str, Any] = {}
    """Passed to the reasoning-gym task."""

    @field_validator("prompt")
    @classmethod
    def _asks(cls, prompt: str) -> str:
        if "{question}" not in prompt:
            raise ValueError("must contain {question}")
        return prompt


def load(**options: Any) -> "ReasoningGym":
    """ConfigError names an unknown option, task or setting and the nearest known one."""
    try:
        return ReasoningGym(Options(**options))
    except ValidationError as error:
        raise ConfigError(*(_problem(e) for e in error.errors())) from None


def is_heldout(question: str, share: float) -> bool:
    """Whether a question belongs to the held-out split: depends on nothing but the case-folded question and the share."""
    return xxhash.xxh3_64_intdigest(question.casefold().encode()) < share * 2**64


class ReasoningGym(Environment):
    def __init__(self, options: Options) -> None:
        self.options = options
        share = {"train": 1 - options.heldout, "heldout": options.heldout, "all": 1.0}[options.split]
        # task i is the first of items i, i + size, i + 2 size, ... in the split; so many that missing it in all has chance 1e-6
        self._rounds = 1 if share == 1.0 else math.ceil(math.log(1e-6 / options.size) / math.log(1 - share))
        self._dataset = functools.cache(lambda part: _create(options, part))
        self._find = functools.lru_cache(maxsize=65536)(self._find_uncached)
        self._bounded = self._is_bounded()
        first = self._item(self._find(0))
        if options.scoring == "exact" and not isinstance(first["answer"], str):
            raise ConfigError(f'reasoning_gym task {options.task!r} has no single answer; use scoring = "score"')

    def __len__(self) -> int:
        return self.options.size

    def task(self, index: int) -> Task:
        item = self._find(index)
        entry = self._item(item)
        content = self.options.prompt.replace("{question}", entry["question"])
        return Task(f"{self.options.task}-{self.options.seed}-{item}", [{"role": "user", "content": content}], {"item": item})

    def reward(self, task: Task, answer: str) -> float:
        entry = self._item(task.data["item"])
        given = extract(answer, self.options.answer)
        if self.options.scoring == "score":
            return self._dataset(0).score_answer(answer=given, entry=entry)
        return float(given is not None and same(given, entry["answer"].strip()))

    def _item(self, item: int) -> dict[str, Any]:
        part, offset = divmod(item, self.options.size) if self._bounded else (0, item)
        dataset = self._dataset(part)
        try:
            return dataset[offset]
        except Exception as error:  # 106 generators, each with its own way to fail
            raise ConfigError(
                f"reasoning_gym task {self.options.task!r} can't generate item {item} with these settings: {type(error).__name__}: {error}"
            ) from error

    def _is_bounded(self) -> bool:
        """Whether the task makes its `size` items beforehand, so that further ones need another dataset."""
        try:
            self._dataset(0)[self.options.size]
        except IndexError:
            return True
        except Exception:  # item 0 tells what is wrong
            return False
        return False

    def _find_uncached(self, index: int) -> int:
        if not 0 <= index < self.options.size:
            raise IndexError(index)
        for item in range(index, self.options.size * self._rounds, self.options.size):
            heldout = self.options.split != "all" and is_heldout(self._item(item)["question"], self.options.heldout)
            if self.options.split == "all" or heldout == (self.options.split == "heldout"):
                return item
        raise ConfigError(
            f"reasoning_gym task {self.options.task!r}: none of {self._rounds} questions is in split {self.options.split!r}; "
            f"it has too few different questions for heldout = {self.options.heldout}"
        )


def extract(reply: str, how: str) -> str | None:
    """The answer in a reply, or None where it has none."""
    if how == "last_number":
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", reply)
        return numbers[-1].replace(",", "") if numbers else None
    if how == "last_line":
        return next((line.strip() for line in reversed(reply.splitlines()) if line.strip()), None)
    if how == "tag":
        tags = re.findall(r"<answer>(.*?)</answer>", reply, re.DOTALL)
        return tags[-1].strip() if tags else None
    return reply.strip()


def same(given: str, expected: str) -> bool:
    """Equal as text, or as plain decimal numbers (4.0 is 4)."""
    number = re.compile(r"-?\d+(\.\d+)?")
    if number.fullmatch(given) and number.fullmatch(expected):
        return Decimal(given) == Decimal(expected)
    return given == expected


def _create(options: Options, part: int) -> Any:
    """The dataset whose item i is item part * size + i of the whole."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of its dependencies' sources
            from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(f"environment 'reasoning_gym' needs the package reasoning-gym ({error}); pip install reasoning-gym") from error
    if options.task not in DATASETS:
        raise ConfigError("reasoning_gym: " + unknown_key(options.task, DATASETS, "task"))
    known = [f.name for f in dataclasses.fields(DATASETS[options.task][1]) if f.name not in ("seed", "size")]
    if unknown := [unknown_key(name, known, "setting") for name in options.settings if name not in known]:
        raise ConfigError(*(f"reasoning_gym task {options.task!r}: {problem}" for problem in unknown))
    # item i is drawn with Random(seed + i): hashing keeps the draws of neighbouring seeds apart; some tasks take 32 bits only
    seed = xxhash.xxh3_64_intdigest(str(options.seed).encode()) % 2**31 + part * options.size
    try:
        return create_dataset(options.task, seed=seed, size=options.size, **options.settings)
    except Exception as error:  # settings are checked by asserts, and by whatever the constructors do with them
        raise ConfigError(f"reasoning_gym task {options.task!r}: settings {options.settings}: {type(error).__name__}: {error}") from error


def _problem(error: Any) -> str:
    where = ".".join(["reasoning_gym", *map(str, error["loc"])])
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"
