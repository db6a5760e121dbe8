"""The stack report, where everything is installed and where nothing is."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from dataclasses import asdict
from megatron_rl.platform import stack_report
rows = [asdict(row) for row in stack_report()]
heavy = [name for name in ("torch", "megatron", "vllm", "triton", "transformers", "numpy") if name in sys.modules]
print(json.dumps([rows, heavy]))
"""


def _report(*flags: str):
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})" + PROGRAM
    output = subprocess.run([sys.executable, *flags, "-c", program], capture_output=True, text=True, check=True, cwd="/").stdout
    rows, heavy = json.loads(output)
    assert heavy == []
    return {row["name"]: row for row in rows}


def test_installed_components_report_their_version():
    rows = _report()
    assert rows["torch"]["version"] == version("torch")
    assert rows["megatron-core"]["version"] == version("megatron-core")
    assert rows["transformers"]["version"] == version("transformers")
    assert rows["megatron-core"]["remedy"] == ""


def test_missing_components_come_with_a_remedy():
    # -I -S: no site-packages, so nothing is installed.
    rows = _report("-I", "-S")
    for name in ("torch", "megatron-core", "vllm", "triton", "transformers"):
        assert rows[name]["version"] == "missing"
        assert "install" in rows[name]["remedy"], name
    assert all("\n" not in value for row in rows.values() for value in row.values())
