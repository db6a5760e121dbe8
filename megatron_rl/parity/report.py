"""The comparison: one row per group of tensors, with the largest differences and the tensor that is worst. No torch import."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table as Grid

from megatron_rl.models.family import Family, HFConfig
from megatron_rl.parity.documents import MicroBatch
from megatron_rl.parity.exchange import Tensors


@dataclass(frozen=True)
class Difference:
    """Of one tensor, or the worst of a group."""

    absolute: float
    """Largest |ours - theirs|; nan where either side is."""
    relative: float
    """`absolute` over the largest |theirs|."""
    where: str
    """Name of the tensor, or the place of the token."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    group: str
    tensors: int
    frozen: int
    """Tensors of the group that neither side trains."""
    absolute: float
    relative: float
    worst: str
    """Which tensor (or token) differs most."""
    bound: float
    passed: bool

    @property
    def label(self) -> str:
        return f"{self.what}, {self.group}" if self.group else self.what


def difference(where: str, theirs: np.ndarray, ours: np.ndarray) -> Difference:
    """Of two arrays of one shape; a value that is not finite on either side makes it nan."""
    if theirs.shape != ours.shape:
        raise RuntimeError(f"{where}: transformers has shape {list(theirs.shape)}, we have {list(ours.shape)}")
    if not (np.isfinite(theirs).all() and np.isfinite(ours).all()):
        return Difference(math.nan, math.nan, where)
    absolute, largest = float(np.abs(ours - theirs).max(initial=0.0)), float(np.abs(theirs).max(initial=0.0))
    return Difference(absolute, absolute / largest if largest else math.inf if absolute else 0.0, where)


def compare_outputs(theirs: Tensors, ours: Mapping[str, np.ndarray], batches: list[MicroBatch], atol: float) -> list[Row]:
    """Log-probs and entropies, token by token; `ours["positions"]` says which token each entry is."""
    expected = sum(len(document) for documents in batches for document in documents)
    if not np.array_equal(np.unique(ours["positions"]), np.arange(expected)) or len(ours["positions"]) != expected:
        raise RuntimeError(f"the ranks computed {len(ours['positions'])} tokens, of {expected} that there are")
    rows = []
    for name, what in (("log_probs", "log-probs"), ("entropy", "entropy")):
        reference = theirs.read(name)[ours["positions"]]
        worst = int(np.argmax(np.nan_to_num(np.abs(ours[name] - reference), nan=np.inf)))
        found = difference(_token(int(ours["positions"][worst]), batches), reference, ours[name])
        rows.append(_row(what, "", [found], 0, atol, by_relative=False))
    return rows


def compare_losses(theirs: np.ndarray, ours: np.ndarray, atol: float) -> Row:
    """The mean loss of each step."""
    found = [difference(f"step {step}: {ours[step]:.6f}", theirs[step], ours[step]) for step in range(len(theirs))]
    return _row("loss", "", found, 0, atol, by_relative=False)


def compare_tensors(what: str, theirs: Tensors, ours: Tensors, groups: Mapping[str, str], bound: float, by_relative: bool) -> list[Row]:
    """One row per group, in the order of `groups` (every HF name of the model -> its group). A tensor that only one side trains differs
    infinitely; one that neither does is frozen."""
    rows = []
    for group in dict.fromkeys(groups.values()):
        names = [name for name, of in groups.items() if of == group]
        found = []
        for name in names:
            if name in theirs.names and name in ours.names:
                found.append(difference(name, theirs.read(name), ours.read(name)))
            elif name in theirs.names | ours.names:
                side = "transformers" if name in theirs.names else "our side"
                found.append(Difference(math.inf, math.inf, f"{name} (only {side} trains it)"))
        rows.append(_row(what, group, found, len(names) - len(found), bound, by_relative))
    if unknown := sorted((theirs.names | ours.names) - set(groups)):
        rows.append(_row(what, "unknown", [Difference(math.inf, math.inf, name) for name in unknown], 0, bound, by_relative))
    return rows


def groups_of(family: Family, hf: HFConfig) -> dict[str, str]:
    """HF name -> group of every tensor of this model, in the order of the table that is shown."""
    found = {tensor.name: _group(rule.megatron) for rule in family.tensors(hf) for tensor in rule.hf}
    return dict(sorted(found.items(), key=lambda item: _ORDER.index(item[1])))


_ORDER = ("embedding", "attention", "indexer", "mlp", "router", "experts", "shared experts", "norms", "head")


def _group(megatron: str) -> str:
    """By the canonical name."""
    for part, group in (
        ("embedding.", "embedding"),
        ("output_layer.", "head"),
        (".indexer.", "indexer"),
        ("norm.", "norms"),
        (".self_attention.", "attention"),
        (".router.", "router"),
        (".shared_experts.", "shared experts"),
        (".experts.", "experts"),
    ):
        if part in megatron:
            return group
    return "mlp"


def _row(what: str, group: str, found: list[Difference], frozen: int, bound: float, by_relative: bool) -> Row:
    def judged(difference: Difference) -> float:
        value = difference.relative if by_relative else difference.absolute
        return math.inf if math.isnan(value) else value

    if not found:
        return Row(what, group, 0, frozen, 0.0, 0.0, "", bound, True)
    worst = max(found, key=judged)
    absolute, relative = (np.max([getattr(d, name) for d in found]).item() for name in ("absolute", "relative"))
    return Row(what, group, len(found), frozen, absolute, relative, worst.where, bound, judged(worst) <= bound)


def _token(position: int, batches: list[MicroBatch]) -> str:
    for number, documents in enumerate(batches):
        tokens = sum(map(len, documents))
        if position < tokens:
            return f"micro-batch {number}, token {position}"
        position -= tokens
    raise AssertionError(f"token {position} is in no micro-batch")


def table(rows: list[Row], title: str) -> Grid:
    """For the console."""
    grid = Grid(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("", "tensors", "max abs", "max rel", "bound"):
        grid.add_column(name, justify="right" if name else "left", no_wrap=True)
    grid.add_column("")
    grid.add_column("worst", overflow="fold")
    for previous, row in zip([None, *rows], rows, strict=False):
        if row.group and previous and row.what != previous.what:
            grid.add_section()
        count = f"{row.tensors}{f' + {row.frozen} frozen' if row.frozen else ''}" if row.group else ""
        if not row.tensors:
            grid.add_row(row.label, f"{row.frozen} frozen")
            continue
        verdict = "[green]ok[/green]" if row.passed else "[red]FAIL[/red]"
        grid.add_row(row.label, count, f"{row.absolute:.1e}", f"{row.relative:.1e}", f"{row.bound:.0e}", verdict, row.worst)
    return grid


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows for JSON, which knows no infinity and no nan: they are null."""
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in asdict(row).items()}
        for row in rows
    ]


def compare(folder: Path, groups: Mapping[str, str], batches: list[MicroBatch], atol: float, rtol: float, steps: int) -> list[Row]:
    """Everything the two sides left in `folder`."""
    outputs, losses = [], []
    for number in sorted(int(path.name.split(".")[2]) for path in folder.glob("ours.outputs.*.safetensors")):
        outputs.append(Tensors(folder, f"ours.outputs.{number}"))
        losses.append(Tensors(folder, f"ours.loss.{number}").read("loss"))
    ours = {name: np.concatenate([tensors.read(name) for tensors in outputs]) for name in ("positions", "log_probs", "entropy")}
    rows = compare_outputs(Tensors(folder, "oracle.outputs"), ours, batches, atol)
    rows.append(compare_losses(Tensors(folder, "oracle.loss").read("loss"), np.sum(losses, axis=0), atol))
    both = (Tensors(folder, f"{side}.gradients") for side in ("oracle", "ours"))
    rows += compare_tensors("gradient", *both, groups, rtol, by_relative=True)
    if steps:
        both = (Tensors(folder, f"{side}.parameters") for side in ("oracle", "ours"))
        rows += compare_tensors("parameters", *both, groups, atol / 10, by_relative=False)
    return rows
