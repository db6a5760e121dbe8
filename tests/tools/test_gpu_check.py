"""tools/gpu_check.py with --cpu runs what it runs on a GPU, but for TransformerEngine and the recipes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--cpu", "--steps", "12", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return (out / "cpu.md").read_text()


def rows(page: str, title: str) -> list[list[str]]:
    section = page.partition(f"## {title}")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")][2:]


def test_every_family_agrees_with_transformers(page):
    found = {row[0]: row for row in rows(page, "Parity")}
    assert set(found) == {"llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "glm_moe_dsa"}
    for _, backend, log_probs, gradient in found.values():
        assert (backend, gradient) == ("torch", "0.0e+00")
        assert 0 < float(log_probs) < 1e-4


def test_the_model_learns_and_every_recipe_is_accounted_for(page):
    base, *recipes = rows(page, "Training")
    assert base[0] == "float32" and float(base[2]) < float(base[1]) and base[3] == "+0.0000" and float(base[4].replace(",", "")) > 0
    assert [row[0] for row in recipes] == ["delayed", "current", "blockwise", "mxfp8", "nvfp4"]
    assert all("needs a GPU" in row[3] for row in recipes)


def test_the_stack_is_reported(page):
    assert {"torch", "megatron-core"} <= {row[0] for row in rows(page, "Stack")}
