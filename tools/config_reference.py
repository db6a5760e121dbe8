"""docs/config.md from the pydantic models: `python tools/config_reference.py > docs/config.md` (`make docs`)."""

import sys

from megatron_rl.cli_help import COMPOSITION, purpose, repeated, title
from megatron_rl.config.base import Table
from megatron_rl.config.run import EvalRunConfig, RLConfig, SftRunConfig
from megatron_rl.config.schema import TableDoc, keys, tables

HEAD = """# Config reference

Generated from the pydantic models by `make docs`; a test keeps it up to date.

A config is TOML. `megatron-rl rl @ a.toml @ b.toml --trainer.optim.lr 1e-5` composes it: defaults < files left to right < command line.
Unknown keys and values of another type fail, all mistakes are told at once, and `--dry-run` shows what was understood.

| word | meaning |
|---|---|
"""


def reference() -> str:
    """The whole page."""
    lines = [HEAD + "\n".join(f"| `{word}` | {escape(doc)} |" for word, doc in COMPOSITION), "", "## `megatron-rl rl`", ""]
    shown: dict[type[Table], TableDoc] = {}
    for doc in tables(RLConfig):
        lines += section(doc, shown)
    for name, table, words in (("sft", SftRunConfig, "an rl config without"), ("eval", EvalRunConfig, "an rl config without")):
        missing = [key for key in RLConfig.model_fields if key not in table.model_fields]
        lines += [
            f"## `megatron-rl {name}`",
            "",
            f"The keys of {words} {', '.join(f'`{key}`' for key in missing)}. `{name}` is required.",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def section(doc: TableDoc, shown: dict[type[Table], TableDoc]) -> list[str]:
    """One table of the config, as a heading and a table of its keys."""
    rows = keys(doc)
    if not rows:
        return []
    lines = [f"### {title(doc.path)}", ""]
    if doc.path and purpose(doc.table):
        lines += [purpose(doc.table), ""]
    if doc.table in shown:
        return [*lines, f"Keys {repeated(doc, shown[doc.table])}.", ""]
    shown[doc.table] = doc
    lines += ["| key | type | default | |", "|---|---|---|---|"]
    for row in rows:
        default = row.default if row.default in ("required", "-") else f"`{row.default}`"
        lines.append(f"| `{row.path.rpartition('.')[2]}` | {escape(row.type)} | {default} | {escape(row.doc)} |")
    return [*lines, ""]


def escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
