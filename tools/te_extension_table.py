"""The names that TransformerEngine's C++ module exports, from the pybind sources of the unpacked transformer_engine_torch sdist.

`python tools/te_extension_table.py SDIST_DIRECTORY > tests/data/te/extension.json`; rerun for another TE version. The sdist can't be
built without CUDA, but pip leaves it unpacked in TMPDIR:
`pip download --no-deps --no-binary :all: --no-build-isolation --no-clean transformer-engine-torch==VERSION`.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any


def table(root: Path) -> dict[str, Any]:
    """{"version", "enums": {name: {member: value}}, "classes", "functions", "submodules": {name: functions}}."""
    headers = "\n".join(_code(path) for path in sorted(root.rglob("*.h")))
    bindings = _code(root / "common_headers/common/util/pybind_helper.h") + "\n".join(map(_code, sorted((root / "csrc").rglob("*.cpp"))))
    submodules = dict(re.findall(r'(\w+)\s*=\s*m\.def_submodule\(\s*"(\w+)"', bindings))
    return {
        "version": (root / "build_tools/VERSION.txt").read_text().strip(),
        "enums": _exported_enums(bindings, _enum_values(headers)),
        "classes": _names(r'class_<[^;]*?>\s*\(\s*m,\s*"(\w+)"', bindings),
        "functions": _names(r'\bm\.def\(\s*"(\w+)"', bindings),
        "submodules": {name: _names(rf'\b{variable}\.def\(\s*"(\w+)"', bindings) for variable, name in submodules.items()},
    }


def _code(path: Path) -> str:
    """Source without comments and line continuations."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(errors="ignore"), flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text).replace("\\\n", "\n")


def _names(pattern: str, text: str) -> list[str]:
    return sorted(set(re.findall(pattern, text, flags=re.DOTALL)))


def _enum_values(headers: str) -> dict[str, dict[str, int]]:
    """C++ enum -> member -> value, both spellings: `enum [class] Name {...}` and `typedef enum {...} Name`."""
    found = re.findall(r"enum\s+(?:class\s+)?(\w+)\s*(?::\s*\w+\s*)?\{(.*?)\}", headers, flags=re.DOTALL)
    found += [(name, body) for body, name in re.findall(r"typedef\s+enum\s*\w*\s*\{(.*?)\}\s*(\w+)\s*;", headers, flags=re.DOTALL)]
    enums: dict[str, dict[str, int]] = {}
    for name, body in found:
        members: dict[str, int] = {}
        for item in filter(None, map(str.strip, body.split(","))):
            member, _, value = map(str.strip, item.partition("="))
            following = [*members.values()][-1] + 1 if members else 0
            members[member] = following if not value else members[value] if value in members else int(value, 0)
        enums.setdefault(name, members)
    return enums


def _exported_enums(bindings: str, values: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    pattern = r'enum_<([\w:]+)>\(\s*m,\s*"(\w+)"[^)]*\)\s*\)?((?:\s*\.value\([^)]*\))+)'
    return {
        name: {
            member: values[cpp.split("::")[-1]][value.split("::")[-1]]
            for member, value in re.findall(r'\.value\(\s*"(\w+)"\s*,\s*([\w:]+)\s*\)', members)
        }
        for cpp, name, members in re.findall(pattern, bindings)
    }


if __name__ == "__main__":
    print(json.dumps(table(Path(sys.argv[1])), indent=1))
