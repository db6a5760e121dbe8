"""`megatron-rl parity` on directories that no other test has seen: layouts pass, a corrupted directory is told in one line, other numbers
exit with 1."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_glm4_moe, write_llama, write_qwen3, write_qwen3_moe

from megatron_rl import cli

SIZES = {"hidden_size": 60, "intermediate_size": 72, "vocab_size": 127, "num_attention_heads": 6, "initializer_range": 0.1}
QUERY, NORM = "model.layers.2.self_attn.q_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    write_qwen3(path / "qwen3", tied=True, **SIZES, head_dim=24)
    write_llama(path / "llama", **SIZES, head_dim=8)
    write_qwen3_moe(path / "qwen3_moe", **SIZES, num_experts=6, moe_intermediate_size=24, mlp_only_layers=[2])
    write_glm4_moe(path / "glm4_moe", **SIZES, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
    return path


def parity(*words):
    """(exit code, what --json printed, standard error) of the real command."""
    command = [sys.executable, "-m", "megatron_rl.cli", "parity", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


DENSE = {"embedding", "attention", "mlp", "norms"}


@pytest.mark.ranks
@pytest.mark.parity
@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ("--model qwen3 --tensor-parallel 2 --packed --steps 2", DENSE),
        ("--model llama --context-parallel 2 --context-parallel-kind ring --packed --tokens 50 --recompute full", DENSE | {"head"}),
        ("--model qwen3_moe --expert-parallel 2 --steps 2", DENSE | {"router", "experts", "head"}),
        (
            "--model glm4_moe --pipeline-parallel 2 --virtual-pipeline-parallel 2 --seed 5",
            DENSE | {"router", "experts", "shared experts", "head"},
        ),
    ],
)
def test_a_model_never_seen_equals_transformers_on_a_layout(models, words, groups):
    words = words.split()
    code, result, error = parity(words[0], str(models / words[1]), *words[2:])
    assert (code, error) == (0, "")
    rows = {(row["what"], row["group"]): row for row in result["rows"]}
    assert {group for what, group in rows if what == "gradient"} == groups
    assert all(row["passed"] for row in rows.values()) and result["passed"]
    # Float32 agrees far better than the bounds ask: 1e-5 of the issue for layouts, and no comparison of a tensor with itself.
    gradients = [row["relative"] for (what, _), row in rows.items() if what == "gradient"]
    assert 0 < max(gradients) < 1e-5
    assert rows["loss", ""]["absolute"] < 1e-5
    held = {name for name in load_file(models / words[1] / "model.safetensors") if "e_score_correction_bias" not in name}
    for what in {"gradient", "parameters"} if "--steps" in words else {"gradient"}:
        assert sum(row["tensors"] for (of, _), row in rows.items() if of == what) == len(held)
        assert sum(row["frozen"] for (of, _), row in rows.items() if of == what) == (3 if words[1] == "glm4_moe" else 0)


@pytest.mark.ranks
@pytest.mark.parity
def test_numbers_that_differ_exit_with_1_and_name_group_and_tensor(models):
    # bfloat16 on our side alone: about three digits, which the bounds of float32 do not forgive.
    code, result, error = parity("--model", str(models / "llama"), "--dtype", "bfloat16", "--atol", "1e-4", "--rtol", "1e-4")
    assert (code, result["passed"]) == (1, False)
    attention = next(row for row in result["rows"] if row["group"] == "attention")
    assert not attention["passed"] and 1e-4 < attention["relative"] < 1
    assert error.startswith(f"error: parity: {models}/llama differs from transformers: log-probs (micro-batch ")
    assert f"gradient, attention ({attention['worst']})" in error
    assert len(error.splitlines()) == 1


@pytest.fixture
def model(models, tmp_path, monkeypatch):
    """A directory to break, beside the place where the command runs; nothing may be started."""
    for source in (models / "qwen3").iterdir():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / source.name).write_bytes(source.read_bytes())
    monkeypatch.chdir(tmp_path)

    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    return tmp_path / "model"


def change_weights(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def change_config(model, **values):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **values}))


def write_index(model):
    names = [*load_file(model / "model.safetensors"), QUERY.replace("2", "9")]
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (lambda m: m.rename("gone"), "model: model is not a directory; give a local HF model directory (config.json and *.safetensors)"),
        (lambda m: (m / "config.json").unlink(), "model: model/config.json cannot be read: No such file or directory"),
        (
            lambda m: change_config(m, architectures=["MambaForCausalLM"]),
            "config.json: architectures = ['MambaForCausalLM'] is not supported",
        ),
        (lambda m: change_weights(m, lambda t: t.pop(QUERY)), f"model: model: tensor {QUERY} is missing"),
        (
            lambda m: change_weights(m, lambda t: t.update({"model.extra.weight": torch.ones(3)})),
            "model: model/model.safetensors: unexpected tensor model.extra.weight; config.json describes a qwen3 model without it",
        ),
        (
            lambda m: change_weights(m, lambda t: t.update({NORM: torch.ones(61)})),
            f"model: model/model.safetensors: tensor {NORM} has shape [61], config.json asks for [60]",
        ),
        (
            lambda m: change_config(m, num_hidden_layers=5),
            "model: model: tensor model.layers.4.input_layernorm.weight is missing (and 10 more problems)",
        ),
        (
            lambda m: os.truncate(m / "model.safetensors", (m / "model.safetensors").stat().st_size - 1),
            f"model: model/model.safetensors is no safetensors file, or was cut short: tensor {NORM} is not all there",
        ),
        (
            write_index,
            "model: model/model.safetensors: tensor model.layers.9.self_attn.q_proj.weight is missing, "
            "though model.safetensors.index.json lists it",
        ),
    ],
    ids=["gone", "no-config", "architecture", "missing", "unexpected", "misshaped", "a-layer-short", "cut-short", "index"],
)
def test_a_bad_directory_is_one_line_before_anything_starts(model, capsys, break_it, error):
    break_it(model)
    assert cli.main(["parity", "--model", "model"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {error}")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "--tensor-parallel 4",
            "[trainer.parallel] tensor_parallel = 4 does not divide the model's 6 attention heads; choose one of 1, 2, 3, 6",
        ),
        ("--pipeline-parallel 3", "[trainer.parallel] pipeline_parallel = 3 does not divide the model's 4 layers"),
        ("--virtual-pipeline-parallel 2", "[trainer.parallel] virtual_pipeline_parallel needs pipeline_parallel of 2 or more"),
        ("--expert-parallel 2", "[trainer.parallel] expert_parallel = 2, but the model has no experts"),
        ("--dtype bfloat16", "dtype = 'bfloat16' has no default bounds: give atol and rtol"),
        ("--pipeline-parallel 2 --token-dispatcher allgather", "moe.token_dispatcher = 'allgather' needs micro-batches of one length"),
        ("--tensor-paralel 2", "tensor_paralel: unknown key (command line); did you mean tensor_parallel?"),
        ("@ layout.toml", "parity reads its settings from the command line alone"),
        ("--dry-run", "parity reads its settings from the command line alone"),
    ],
)
def test_an_impossible_layout_is_told_before_anything_starts(model, capsys, words, error):
    assert cli.main(["parity", "--model", "model", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")


def test_too_few_replicas_for_the_experts_are_told(models, capsys):
    assert cli.main(["parity", "--model", str(models / "qwen3_moe"), "--expert-parallel", "2", "--data-parallel", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: expert_parallel x expert_tensor_parallel = 2 do not divide the 1 ranks of a stage; start a multiple of 2 ranks\n"
    )


def test_mistakes_are_found_without_torch(models):
    program = (
        "import sys; from megatron_rl.cli import main; "
        f"code = main(['parity', '--model', {str(models / 'qwen3')!r}, '--tensor-parallel', '5']); print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2 False\n", done.stderr
