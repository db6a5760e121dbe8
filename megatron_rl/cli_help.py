"""`--help`: the text of the subcommands, and the config tables straight from the pydantic models."""

import inspect
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from megatron_rl.config.base import Table
from megatron_rl.config.schema import TableDoc, keys, tables

WIDTH = 110


def version() -> None:
    print(f"megatron-rl {installed_version('megatron-rl')}")


def overview(subcommands: Sequence[Any]) -> None:
    """`megatron-rl --help`"""
    console = _console()
    console.print("megatron-rl: RL post-training of large language models on Megatron-Core, with vLLM rollouts\n")
    _heading(console, "usage")
    console.print(Padding("megatron-rl SUBCOMMAND @ config.toml [@ more.toml ...] [--dotted.key value ...]\n", (0, 0, 0, 2), expand=False))
    _heading(console, "subcommands")
    grid = _grid()
    for subcommand in subcommands:
        grid.add_row(Text("  " + subcommand.name, style="bold"), subcommand.purpose)
    console.print(grid)
    console.print("\n`megatron-rl SUBCOMMAND --help` shows examples and every config key with its default.")


def subcommand(command: Any) -> None:
    """`megatron-rl rl --help`"""
    console = _console()
    console.print(f"megatron-rl {command.name}: {command.purpose}\n")
    if command.about:
        console.print(Padding(command.about + "\n", (0, 0, 0, 2), expand=False))
    _heading(console, "usage")
    words = [f"megatron-rl {command.name}"]
    for option in command.all_options():
        word = f"{option.name} {option.metavar}".strip() if option.name.startswith("-") else option.metavar
        words.append(word if option.required else f"[{word}]")
    if command.config:
        words.append("@ config.toml [@ more.toml ...] [--dotted.key value ...]" if command.files else "--key value [--key value ...]")
    console.print(Padding(" ".join(words) + "\n", (0, 0, 0, 2), expand=False))
    _heading(console, "examples")
    for example in command.examples:
        console.print(Padding(example, (0, 0, 0, 2), expand=False), soft_wrap=True)
    console.print()
    if command.all_options() or command.config:
        _heading(console, "options")
        grid = _grid()
        for option in command.all_options():
            name = f"{option.name} {option.metavar}" if option.name.startswith("-") else option.metavar
            grid.add_row(f"  {name}", option.doc)
        for name, doc in COMPOSITION if command.config and command.files else ():
            if not name.startswith("--resume") or "resume" in command.config.model_fields:
                grid.add_row(f"  {name}", doc)
        console.print(grid)
        console.print()
    if command.config:
        config(console, command.config)


COMPOSITION = (
    ("@ FILE", "a TOML config (or a resolved.json); later files win over earlier ones, tables merge, lists are replaced"),
    (
        "--dotted.key VALUE",
        "one key; wins over every file. Bare --flag sets true, --no-flag false; 'none' empties a key that may be absent",
    ),
    ("--list.0.key VALUE", "one key of an element of a list, as in --train.source.0.group-size 4"),
    ("--resume", "go on from the last complete checkpoint of the run directory"),
    ("--resume.dir DIR", "start a new run from the last complete checkpoint of another"),
    ("--clean", "delete what the run directory holds and start afresh"),
    ("--dry-run", "print the resolved config and the placement, check everything, touch nothing"),
)


def config(console: Console, table: type[Table]) -> None:
    """Every key of a config, table by table."""
    _heading(console, "config keys")
    shown: dict[type[Table], TableDoc] = {}
    for doc in tables(table):
        rows = keys(doc)
        if not rows:
            continue
        console.print(
            Padding(
                Text.assemble((title(doc.path), "bold cyan"), f"  {purpose(doc.table)}" if doc.path else ""), (0, 0, 0, 2), expand=False
            )
        )
        if doc.table in shown:
            console.print(Padding(repeated(doc, shown[doc.table]) + "\n", (0, 0, 0, 4), expand=False))
            continue
        shown[doc.table] = doc
        grid = _grid()
        grid.add_column(min_width=20, max_width=36, overflow="fold")
        grid.add_column(ratio=1)
        for row in rows:
            default = "required" if row.default == "required" else f"default {row.default}"
            text = Text(f"{row.type}; {default}" if row.default != "-" else row.type, style="dim")
            grid.add_row(f"    {row.path.rpartition('.')[2]}", text, row.doc)
        console.print(grid)
        console.print()


def repeated(doc: TableDoc, first: TableDoc) -> str:
    """What is to be said of a table whose keys were listed before."""
    other = [
        f"{row.path.rpartition('.')[2]} = {row.default}"
        for row, old in zip(keys(doc), keys(first), strict=True)
        if row.default != old.default
    ]
    return f"as {title(first.path)}" + (f", with default {', '.join(other)}" if other else "")


def title(path: str) -> str:
    """[trainer.optim], [[train.source]], or the top level."""
    if not path:
        return "top level"
    return f"[[{path[:-2]}]]" if path.endswith("[]") else f"[{path.replace('[]', '')}]"


def purpose(table: type[Table]) -> str:
    """The docstring of a table, without the name of the table in front."""
    doc = " ".join(inspect.cleandoc(table.__doc__ or "").split())
    return doc.partition("] ")[2] if doc.startswith("[") else doc


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def _grid() -> Grid:
    grid = Grid(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    return grid


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    return console
