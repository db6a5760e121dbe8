"""The stand-in for TransformerEngine's C++ module: complete, honest about what it can't do, and right where it computes."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def result(in_te):
    return in_te("te_extension_cases.py:main")


def test_it_is_of_the_version_that_the_gpu_image_installs():
    (pin,) = [line for line in (ROOT / "requirements" / "te.txt").read_text().splitlines() if line.startswith("transformer-engine==")]
    assert json.loads((ROOT / "tests" / "data" / "te" / "extension.json").read_text())["version"] == pin.partition("==")[2]
    assert pin in (ROOT / "requirements" / "gpu.txt").read_text().splitlines()


def test_it_has_every_name_that_transformer_engine_takes_from_it(result):
    assert result["unknown"] == ["LayerNorm"]  # TE's ONNX export takes it from the wrong module


def test_a_kernel_that_is_not_there_says_so(result):
    assert result["refusal"] == "transformer_engine_torch.gelu needs TransformerEngine's C++ module and a GPU"


@pytest.mark.parametrize("module", ["linear", "rmsnorm", "norm and linear", "grouped linear"])
def test_transformer_engine_modules_compute_what_torch_computes(result, module):
    assert result["differences"][module] < 5e-7


def test_megatron_imports_nothing_that_this_transformer_engine_lacks(result):
    # What is absent was renamed or removed; Megatron asks for the version or falls back.
    assert [name for name in result["absent"] if name.endswith("(none)")] == []
    assert len(result["absent"]) == 4
