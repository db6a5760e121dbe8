"""megatron-to-hf --quantize: what every weight becomes, against the formats' own arithmetic, modelopt's export and vLLM's readers."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_models import write_glm4_moe, write_qwen3, write_qwen3_moe
from transformers import AutoModelForCausalLM

from megatron_rl.cli import main
from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.hf_to_megatron import hf_to_megatron
from megatron_rl.conversion.megatron_to_hf import megatron_to_hf
from megatron_rl.conversion.verify import VerificationFailed

RECIPES = ("fp8", "fp8_blockwise", "nvfp4", "mxfp8")
FAMILIES = {"qwen3": lambda path, **sizes: write_qwen3(path, tied=False, **sizes), "qwen3_moe": write_qwen3_moe, "glm4_moe": write_glm4_moe}
SIZES = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
EXPERT = {"moe_intermediate_size": 256}
KEPT = ("embed_tokens", "lm_head", "norm", ".mlp.gate.", ".bias")


def to_megatron(hf_dir: Path, destination: Path) -> Path:
    hf_to_megatron(hf_dir, destination, ParallelConfig(), resume=False, check=False, console=Console(quiet=True))
    return destination


def quantize(source: Path, destination: Path, recipe: str, **options: object) -> Path:
    settings = {"resume": False, "check": False, "console": Console(quiet=True), **options}
    megatron_to_hf(source, destination, None, recipe, **settings)
    return destination


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: a directory with hf (bfloat16), megatron and one directory per recipe."""
    found = {}
    for family, write in FAMILIES.items():
        root = tmp_path_factory.mktemp(family)
        model = write(root / "hf", **SIZES, **({} if family == "qwen3" else EXPERT))
        model.bfloat16()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # float32 in every checkpoint
                buffer.data = buffer.float()
        model.save_pretrained(root / "hf")
        to_megatron(root / "hf", root / "megatron")
        for recipe in RECIPES:
            quantize(root / "megatron", root / recipe, recipe, check=True, shard_bytes=1 << 18)
        found[family] = root
    return found


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Sign, two exponent bits (bias 1), one mantissa bit; the even column in the low half of a byte."""
    values = []
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        values.append(-magnitude if code & 8 else magnitude)
    table = torch.tensor(values, dtype=torch.float64)
    both = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
    both[:, 0::2], both[:, 1::2] = table[(packed & 15).long()], table[(packed >> 4).long()]
    return both


def value_and_bound(recipe: str, found: dict[str, torch.Tensor], base: str, original: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantised weight and the largest error of its format at each element, float64.

    e4m3 has 3 mantissa bits, so rounding errs by 2^-4 of the value, and by half of its smallest step, 2^-10, below 2^-6. bfloat16 (fp8's
    quotient) adds 2^-9 of the value, and the cast sees the quotient after that. e2m1 errs by half of the gap from 4 to 6, 1 step; a block
    scale rounded down to e4m3 by 1/17 clips at most 6/16 of a step; a subnormal one is 2^-10 too small, 6 times that at the end.
    """
    if recipe == "nvfp4":
        block = found[base + "weight_scale"].double().repeat_interleave(16, 1)
        whole = found[base + "weight_scale_2"].double()
        return e2m1(found[base + "weight"]) * block * whole, (block * 1.0001 + 6 * 2**-10) * whole
    if recipe == "mxfp8":
        step = (2.0 ** (found[base + "weight_scale"].double() - 127)).repeat_interleave(32, 1)
    elif recipe == "fp8_blockwise":
        step = found[base + "weight_scale_inv"].double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: original.shape[0]]
    else:
        step = found[base + "weight_scale"].double()
    relative = 2**-4 + (2**-8 if recipe == "fp8" else 0)
    return found[base + "weight"].double() * step, (relative * original.abs() + 2**-10 * step) * 1.0001


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_is_as_near_as_its_format_allows_and_all_else_is_untouched(exports, family, recipe):
    before, after = weights(exports[family] / "hf"), weights(exports[family] / recipe)
    scales = {"fp8_blockwise": {"weight_scale_inv"}, "nvfp4": {"weight_scale", "weight_scale_2"}}.get(recipe, {"weight_scale"})
    expected = set(before)
    for name, original in before.items():
        if original.ndim != 2 or any(part in name for part in KEPT):
            assert after[name].dtype == original.dtype and torch.equal(after[name], original), name
            continue
        base = name.removesuffix("weight")
        expected |= {base + scale for scale in scales}
        assert after[name].dtype == (torch.uint8 if recipe == "nvfp4" else torch.float8_e4m3fn)
        value, bound = value_and_bound(recipe, after, base, original.double())
        assert ((value - original.double()).abs() <= bound).all(), name
        # Bounds alone would pass zeros where scales are far too large.
        relative = (value - original.double()).abs() / original.double().abs().clamp(min=1e-9)
        assert relative.median() < (0.12 if recipe == "nvfp4" else 0.04), name
    assert set(after) == expected
    index = json.loads((exports[family] / recipe / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == expected and len(set(index.values())) > 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_and_scales_are_those_of_modelopts_export(exports, family, recipe, tmp_path):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    names = {"fp8": "FP8_DEFAULT", "fp8_blockwise": "FP8_2D_BLOCKWISE_WEIGHT_ONLY", "nvfp4": "W4A16_NVFP4", "mxfp8": "MXFP8_DEFAULT"}
    model = AutoModelForCausalLM.from_pretrained(exports[family] / "hf", dtype=torch.bfloat16).eval()
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        mtq.quantize(model, copy.deepcopy(getattr(mtq, names[recipe] + "_CFG")), forward_loop=lambda m: m(tokens))
        export_hf_checkpoint(model, export_dir=tmp_path)
    theirs = {name: value for name, value in weights(tmp_path).items() if not name.endswith("input_scale")}
    if recipe == "fp8_blockwise":
        theirs = {name.replace("weight_scale", "weight_scale_inv"): value for name, value in theirs.items()}
    ours = weights(exports[family] / recipe)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if (recipe != "nvfp4" and "weight_scale" in name) or name.endswith("weight_scale_2"):
            value = value.reshape(ours[name].shape)
        assert ours[name].dtype == value.dtype and ours[name].shape == value.shape, name
        assert torch.equal(ours[name].flatten().view(torch.uint8), value.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_reads_the_config_and_expects_these_tensors(exports, family, recipe, tmp_path):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.modelopt import SCHEME_FOR, WEIGHT, Shapes, resolve
    from vllm.model_executor.layers.quantization.utils.fp8_utils import create_fp8_scale_parameter, create_fp8_weight_parameter
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.parameter import BlockQuantScaleParameter, PerTensorScaleParameter

    section = json.loads((exports[family] / recipe / "config.json").read_text())["quantization_config"]
    claims = {method: get_quantization_config(method) for method in ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")}
    claimed = [method for method, reader in claims.items() if reader.override_quantization_method(section, None) is not None]
    assert claimed == {"nvfp4": ["modelopt_fp4"], "mxfp8": ["modelopt_mxfp8"]}.get(recipe, [])
    method = claimed[0] if claimed else section["quant_method"]
    config = get_quantization_config(method).from_config(section)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    if claimed:
        [beside] = config.get_config_filenames()
        same = type(config).from_config(json.loads((exports[family] / recipe / beside).read_text()))
        assert same.exclude_modules == config.exclude_modules

    def skipped(prefix: str) -> bool:
        if claimed:
            return config.is_layer_excluded(prefix)
        return is_layer_skipped(prefix, config.ignored_layers, config.packed_modules_mapping)

    dense, sparse = "model.layers.0.", "model.layers.1."
    if family == "qwen3_moe":
        dense, sparse = sparse, dense
    assert not any(skipped(dense + name) for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"))
    if family != "qwen3":
        assert skipped(sparse + "mlp.gate")
        shared = ("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj")
        assert not any(skipped(sparse + name) for name in ("mlp.experts", *shared))

    found = weights(exports[family] / recipe)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, "gloo")
        initialize_model_parallel()
        try:
            for name in [name for name in weights(exports[family] / "hf") if name.endswith("_proj.weight")]:
                rows, columns = weights(exports[family] / "hf")[name].shape
                layer = torch.nn.Module()
                if claimed:
                    spec, context, _ = resolve(section["quant_algo"], config, name)
                    SCHEME_FOR[spec.weight].create_weights(layer, WEIGHT, context, Shapes([rows], columns, torch.bfloat16), lambda *_: None)
                else:
                    layer.weight = create_fp8_weight_parameter(rows, columns, None)
                    kind = PerTensorScaleParameter if recipe == "fp8" else BlockQuantScaleParameter
                    scale = create_fp8_scale_parameter(kind, [rows], columns, config.weight_block_size, None)
                    layer.register_parameter("weight_scale" if recipe == "fp8" else "weight_scale_inv", scale)
                base = name.removesuffix("weight")
                held = {key.removeprefix(base): value for key, value in found.items() if key.startswith(base) and not key.endswith("bias")}
                wanted = {key: (tuple(value.shape), value.dtype) for key, value in layer.named_parameters()}
                assert {key: (tuple(value.shape) or (1,), value.dtype) for key, value in held.items()} == wanted, name
        finally:
            cleanup_dist_env_and_memory()


def test_two_runs_write_the_same_bytes(exports, tmp_path):
    for recipe in RECIPES:
        again = quantize(exports["glm4_moe"] / "megatron", tmp_path / recipe, recipe, shard_bytes=1 << 18)
        first = exports["glm4_moe"] / recipe
        assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in first.iterdir())
        for path in first.iterdir():
            assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_what_blocks_do_not_divide_is_refused_by_name(tmp_path):
    write_qwen3(tmp_path / "hf", tied=True, num_hidden_layers=1, hidden_size=48, head_dim=20)
    source = to_megatron(tmp_path / "hf", tmp_path / "megatron")
    q_proj = "tensor model.layers.0.self_attn.q_proj.weight [80, 48]"
    for recipe, line in (
        ("mxfp8", f"{q_proj}: mxfp8 needs columns in blocks of 32; choose another recipe"),
        ("fp8_blockwise", f"{q_proj}: fp8_blockwise needs columns in blocks of 128; choose another recipe"),
    ):
        with pytest.raises(ConfigError) as refused:
            quantize(source, tmp_path / "out", recipe)
        assert refused.value.problems == [line]
    assert not list(tmp_path.glob("out*"))


def test_rows_that_a_fused_matrix_would_cut_through_are_refused(tmp_path):
    write_qwen3(tmp_path / "hf", tied=True, num_hidden_layers=1, hidden_size=128, intermediate_size=128, head_dim=32, num_key_value_heads=2)
    source = to_megatron(tmp_path / "hf", tmp_path / "megatron")
    with pytest.raises(ConfigError) as refused:
        quantize(source, tmp_path / "out", "fp8_blockwise")
    assert refused.value.problems == [
        "tensor model.layers.0.self_attn.k_proj.weight [64, 128]: engines stack it on the next one, so fp8_blockwise needs rows in blocks "
        "of 128; choose another recipe"
    ]


def test_a_weight_of_zeros_stays_zero_and_one_that_is_not_finite_is_refused(exports, tmp_path):
    shutil.copytree(exports["qwen3"] / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    zero, bad = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"
    tensors[zero].zero_()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    source = to_megatron(tmp_path / "hf", tmp_path / "megatron")
    for recipe in RECIPES:
        found = weights(quantize(source, tmp_path / recipe, recipe, check=True))
        value, _ = value_and_bound(recipe, found, zero.removesuffix("weight"), tensors[zero].double())
        assert not value.any()
    tensors[bad][3, 5] = float("nan")
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    source = to_megatron(tmp_path / "hf", tmp_path / "broken")
    with pytest.raises(ConfigError, match=f"^tensor {bad} holds NaN or infinity"):
        quantize(source, tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()


def test_verification_notices_a_scale_that_is_not_the_weights(exports, tmp_path, monkeypatch):
    from megatron_rl.conversion import quantize as module

    right = module.quantize

    def wrong(*arguments: object) -> dict[str, torch.Tensor]:
        found = right(*arguments)
        return {**found, "weight_scale": found["weight_scale"] * 1.25}

    monkeypatch.setattr(module, "quantize", wrong)
    with pytest.raises(VerificationFailed, match=r"tensor model.layers.0.self_attn.q_proj.weight differs"):
        quantize(exports["qwen3"] / "megatron", tmp_path / "out", "fp8", check=True)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_a_recipe_and_refuses_others_in_one_line(exports, tmp_path, capsys):
    source = str(exports["qwen3"] / "megatron")
    assert main(["convert", "megatron-to-hf", source, str(tmp_path / "out"), "--quantize", "mxfp8", "--verify"]) == 0
    assert (tmp_path / "out" / "hf_quant_config.json").is_file()
    capsys.readouterr()
    for direction, recipe, line in (
        ("megatron-to-hf", "int4", "'int4' (choose from"),
        ("reshard", "fp8", "--quantize: reshard keeps every bit; leave it out"),
    ):
        assert main(["convert", direction, source, str(tmp_path / "other"), "--quantize", recipe]) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert line in said
    assert not (tmp_path / "other").exists()
