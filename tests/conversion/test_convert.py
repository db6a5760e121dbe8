"""HF -> Megatron -> HF and reshard keep every bit of every tensor, whatever the family, the types, the files and the layout."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from hf_directories import FAMILIES, assert_same, in_shards, tensors_of, variant
from rich.console import Console
from tiny_models import MOE, write_glm4_moe, write_qwen3

from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.dist_reader import DistReader
from megatron_rl.conversion.extent import archive, in_archive
from megatron_rl.conversion.hf_to_megatron import hf_to_megatron
from megatron_rl.conversion.megatron_to_hf import megatron_to_hf
from megatron_rl.conversion.reshard import reshard
from megatron_rl.conversion.verify import VerificationFailed

QUIET = Console(quiet=True)
TP2_PP2 = ParallelConfig(tensor_parallel=2, pipeline_parallel=2)
EP2 = ParallelConfig(tensor_parallel=2, pipeline_parallel=2, expert_parallel=2, expert_tensor_parallel=1)
COMPANIONS = {
    "generation_config.json": '{"temperature": 0.6}',
    "tokenizer_config.json": '{"chat_template": "x"}',
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "vocab.json": "{}",
    "merges.txt": "a b",
}


def to_megatron(source: Path, target: Path, layout: ParallelConfig = TP2_PP2, **options) -> Path:
    hf_to_megatron(source, target, layout, **{"resume": False, "check": False, "console": QUIET, **options})
    return target


def to_hf(source: Path, target: Path, hf_dir: Path | None = None, **options) -> Path:
    megatron_to_hf(source, target, hf_dir, **{"resume": False, "check": False, "console": QUIET, **options})
    return target


def to_layout(source: Path, target: Path, layout: ParallelConfig, **options) -> Path:
    reshard(source, target, layout, None, **{"resume": False, "check": False, "console": QUIET, **options})
    return target


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    path = tmp_path_factory.mktemp("convert") / "qwen3"
    write_qwen3(path, tied=False, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    path = tmp_path_factory.mktemp("convert") / "tied"
    write_qwen3(path, tied=True, num_hidden_layers=2)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_bit_for_bit_through_any_layout(family, tmp_path):
    FAMILIES[family](tmp_path / "hf")
    layout = EP2 if family in MOE else TP2_PP2
    to_megatron(tmp_path / "hf", tmp_path / "megatron", layout, check=True)
    to_layout(tmp_path / "megatron", tmp_path / "resharded", ParallelConfig(), check=True)
    source = tensors_of(tmp_path / "hf")
    assert_same(tensors_of(to_hf(tmp_path / "megatron", tmp_path / "back", check=True)), source)
    assert_same(tensors_of(to_hf(tmp_path / "resharded", tmp_path / "again")), source)
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()


def test_types_are_kept_tensor_by_tensor(qwen3, tmp_path):
    # Norms float32, all else bfloat16; a NaN with a payload and a negative zero among them.
    def mix(tensors):
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].bfloat16()
        tensors["model.norm.weight"].view(torch.int32)[:2] = torch.tensor([0x7FC01234, -(2**31)])

    source = variant(qwen3, tmp_path / "mixed", mix)
    assert {str(tensor.dtype) for tensor in tensors_of(source).values()} == {"torch.bfloat16", "torch.float32"}
    assert_same(tensors_of(to_hf(to_megatron(source, tmp_path / "megatron", check=True), tmp_path / "back")), tensors_of(source))


def test_sharded_sources_are_read_and_shards_are_written(qwen3, tmp_path):
    source = in_shards(qwen3, tmp_path / "sharded", 3)
    back = to_hf(to_megatron(source, tmp_path / "megatron", file_bytes=20_000), tmp_path / "back", shard_bytes=100_000)
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 8
    assert len(list(back.glob("*.safetensors"))) > 2
    assert_same(tensors_of(back), tensors_of(qwen3))


def test_tied_embedding_keeps_its_second_copy_if_it_had_one(tied, tmp_path):
    twice = variant(tied, tmp_path / "twice", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    for source in (tied, twice):
        megatron = to_megatron(source, tmp_path / f"{source.name}.megatron", check=True)
        assert "output_layer.weight" not in DistReader(megatron).tensors
        assert_same(tensors_of(to_hf(megatron, tmp_path / f"{source.name}.back")), tensors_of(source))


def test_unused_tensors_pass_through_with_types_that_the_trainer_does_not_know(tmp_path):
    write_glm4_moe(tmp_path / "plain", num_hidden_layers=2)
    extra = {
        "model.layers.2.eh_proj.weight": torch.randn(48, 96).to(torch.float8_e4m3fn),
        "model.layers.2.shared_head.norm.weight": torch.randn(48).half(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(8),
    }
    source = variant(tmp_path / "plain", tmp_path / "hf", lambda t: t.update(extra), {"num_nextn_predict_layers": 1})
    megatron = to_megatron(in_shards(source, tmp_path / "sharded", 2), tmp_path / "megatron", check=True)
    assert not [key for key in DistReader(megatron).tensors if "layers.4" in key]
    resharded = to_layout(megatron, tmp_path / "resharded", ParallelConfig())
    back = to_hf(resharded, tmp_path / "back", check=True)
    assert_same(tensors_of(back), tensors_of(source))
    assert_same({name: tensors_of(back)[name] for name in extra}, extra)


def test_everything_beside_the_weights_is_carried_byte_by_byte(qwen3, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(qwen3, source)
    for name, text in COMPANIONS.items():
        (source / name).write_text(text)
    back = to_hf(to_layout(to_megatron(source, tmp_path / "a"), tmp_path / "b", ParallelConfig()), tmp_path / "back")
    assert {path.name for path in back.iterdir()} == {
        *COMPANIONS,
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00001.safetensors",
    }
    for name in (*COMPANIONS, "config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()


def test_chunks_are_those_of_the_ranks(qwen3, tmp_path):
    # Two tensor ranks. Vocabulary 259: 130 rows and 129, no padding. Gate above up (80 + 80): each rank has half of either.
    # q, k, v of two key-value groups of (2 + 1 + 1) heads of 16: one group each. Output: columns.
    reader = DistReader(to_megatron(qwen3, tmp_path / "megatron"))
    boxes = {key: [(region.offsets, region.sizes) for region in reader.regions(key)] for key in reader.tensors}
    assert boxes["embedding.word_embeddings.weight"] == [((0, 0), (130, 48)), ((130, 0), (129, 48))]
    halves = [((0, 0), (40, 48)), ((80, 0), (40, 48)), ((40, 0), (40, 48)), ((120, 0), (40, 48))]
    assert boxes["decoder.layers.1.mlp.linear_fc1.weight"] == halves
    assert boxes["decoder.layers.0.self_attention.linear_qkv.weight"] == [((0, 0), (64, 48)), ((64, 0), (64, 48))]
    assert boxes["decoder.layers.0.self_attention.linear_proj.weight"] == [((0, 0), (48, 32)), ((0, 32), (48, 32))]
    assert boxes["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"] == [((0,), (48,))]


def test_verification_names_the_tensor_that_came_out_wrong(qwen3, tmp_path, monkeypatch):
    from megatron_rl.conversion import layout

    right = layout.Shards.assemble

    def swapped(shards, parts):
        wrong = shards.rule.megatron.endswith("2.self_attention.linear_qkv.weight")
        return right(shards, [parts[0], parts[2], parts[1]] if wrong else parts)

    monkeypatch.setattr(layout.Shards, "assemble", swapped)
    with pytest.raises(VerificationFailed, match=r"tensor model\.layers\.1\.self_attn\.k_proj\.weight differs"):
        to_megatron(qwen3, tmp_path / "megatron", check=True)
    assert not (tmp_path / "megatron").exists()


def test_checksums_cover_the_directory(qwen3, tmp_path):
    megatron = to_megatron(qwen3, tmp_path / "megatron")
    listed = json.loads((megatron / "megatron_rl.json").read_text())["xxh3"]
    assert listed.keys() == {path.name for path in megatron.iterdir() if path.is_file()} - {"megatron_rl.json"}
    assert all(xxhash.xxh3_128(path.read_bytes()).hexdigest() == listed[path.name] for path in megatron.glob("*.distcp"))


def test_archives_are_those_of_torch(tmp_path):
    # A chunk that was copied as bytes is what torch.save writes, so that torch.load reads it.
    for tensor in (torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(1, 2, 3)):
        before, after, _ = archive(tuple(tensor.shape), tensor.dtype)
        file = tmp_path / "chunk"
        file.write_bytes(b"else" + before + tensor.view(torch.uint8).numpy().tobytes() + after)
        assert torch.equal(torch.load(io.BytesIO(file.read_bytes()[4:]), weights_only=True), tensor)
        found = in_archive(file, 4, file.stat().st_size - 4, tuple(tensor.shape), tensor.dtype)
        assert file.read_bytes()[found.offset : found.offset + found.nbytes] == tensor.view(torch.uint8).numpy().tobytes()
        for other in (tensor.t() if tensor.dim() == 2 else tensor.double(), torch.cat([tensor, tensor])[1 : 1 + len(tensor)]):
            torch.save(other, file)
            assert in_archive(file, 0, file.stat().st_size, tuple(tensor.shape), tensor.dtype) is None
