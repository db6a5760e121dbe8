"""Manifests: what is written is what is read, and nothing else is taken for one."""

import json

import pytest

from megatron_rl.transports.weights.base import WeightTransferError
from megatron_rl.transports.weights.manifest import Manifest, TensorEntry
from megatron_rl.transports.weights.verify import check_layout

ENTRIES = (
    TensorEntry("model.norm.weight", (4,), "bfloat16", "00000000000000aa", "stage_1_0.safetensors"),
    TensorEntry("model.embed_tokens.weight", (6, 4), "float32", "00000000000000bb", "stage_0_0.safetensors"),
    TensorEntry("lm_head.weight", (6, 4), "float32", "00000000000000cc", "stage_1_0.safetensors"),
)


def test_a_manifest_survives_the_round_trip_in_order():
    manifest = Manifest(7, ENTRIES)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.files == ["stage_1_0.safetensors", "stage_0_0.safetensors"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(format=2), "format 2"),
        (lambda data: data.update(kind="adapter"), "kind 'adapter'"),
        (lambda data: data.update(version=-1), "version -1"),
        (lambda data: data.update(version="3"), "version '3'"),
        (lambda data: data["tensors"].append(data["tensors"][0]), "listed twice: model.norm.weight"),
        (lambda data: data["tensors"][0].update(file="../../secret"), "'../../secret' is not a plain name"),
        (lambda data: data["tensors"][0].pop("xxh3"), "xxh3"),
        (lambda data: data.pop("tensors"), "tensors"),
    ],
)
def test_anything_else_is_refused_with_the_reason(change, said):
    data = json.loads(Manifest(7, ENTRIES).to_json())
    change(data)
    with pytest.raises(WeightTransferError, match=said.replace(".", r"\.")):
        Manifest.from_json(json.dumps(data))


def test_a_torn_or_absent_file_is_named(tmp_path):
    with pytest.raises(WeightTransferError, match=r"manifest\.json"):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text(Manifest(7, ENTRIES).to_json()[:100])
    with pytest.raises(WeightTransferError, match=r"manifest\.json.*not a weight manifest"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("entries", "tensor", "said"),
    [
        (ENTRIES[:2], "lm_head.weight", "version 8 lacks lm_head.weight, which version 7 had"),
        ((*ENTRIES, TensorEntry("extra", (1,), "float32", "0", "f")), "extra", "version 8 has extra, which version 7 had not"),
        (
            (*ENTRIES[:2], TensorEntry("lm_head.weight", (4, 6), "float32", "00000000000000cc", "stage_1_0.safetensors")),
            "lm_head.weight",
            r"lm_head.weight is \(\(4, 6\), 'float32'\) in version 8 but was \(\(6, 4\), 'float32'\) in 7",
        ),
    ],
)
def test_a_version_of_another_layout_is_refused_naming_the_tensor(entries, tensor, said):
    with pytest.raises(WeightTransferError, match=said) as caught:
        check_layout(Manifest(8, entries), Manifest(7, ENTRIES))
    assert caught.value.tensor == tensor
