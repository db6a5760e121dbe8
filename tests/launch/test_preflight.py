"""What is wrong with a config is told before anything starts, all of it at once; `--dry-run` touches nothing."""

import json
import os
import shutil
import socket

import pytest
from model_directory import write_model

from megatron_rl.config.base import ConfigError
from megatron_rl.config.load import load
from megatron_rl.config.run import EvalRunConfig, RLConfig, SftRunConfig
from megatron_rl.launch import preflight
from megatron_rl.platform.stack import Gpu


def check(*words, table=RLConfig, ranks=None):
    preflight.check(load(table, ["@", "rl.toml", *words]).config, ranks)


def problems(*words, **more):
    with pytest.raises(ConfigError) as caught:
        check(*words, **more)
    return caught.value.problems


def test_a_good_config_has_no_problem(place):
    check("--sft.data", "rows.jsonl")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--model.path gone", "model.path: gone is not a directory; give a local HF model directory"),
        ("--model.tokenizer gone", "model.tokenizer: gone is not a directory"),
        (
            "--trainer.micro-batch-tokens 32",
            "trainer.micro_batch_tokens = 32: a sample may have model.context = 64 tokens and is never cut; use 64",
        ),
        (
            "--orchestrator.batch-size 10",
            "orchestrator.batch_size = 10: not a multiple of the group_size 4 of train source 'echo'; use 8 or 12",
        ),
        ("--orchestrator.batch-size 2", "orchestrator.batch_size = 2: not a multiple of the group_size 4 of train source 'echo'; use 4"),
        ("--train.sampling.max-tokens 64", "train.sampling.max_tokens = 64: leaves no room for a prompt in model.context = 64"),
        ("--train.source.0.sampling.max-tokens 99", "train.source.0.sampling.max_tokens = 99: leaves no room"),
        ("--trainer.parallel.pipeline-parallel 3", "pipeline_parallel = 3 does not divide the model's 2 layers"),
        ("--trainer.parallel.data-parallel 9", "orchestrator.batch_size = 8: fewer than trainer.parallel.data_parallel = 9"),
        ("--trainer.loss.name ippo", "trainer.loss: unknown loss 'ippo'; known: ipo"),
        ("--trainer.loss.options.epz 1", "trainer.loss: loss 'ipo' has no option 'epz'; it has: eps"),
        ("--train.advantage-options.stdd true", "train.advantage_options: advantage 'grpo' has no option 'stdd'; it has: std"),
        ("--train.source.0.env.path gone.py", "train: source 'echo': env.path: gone.py is not a file"),
        (
            "--train.source.0.env.options.n 1",
            "train: source 'echo': env.path: echo.py: TypeError: load() got an unexpected keyword argument 'n'",
        ),
        ("--train.source.0.select.skip 3", "train: source 'echo': select.skip = 3 leaves none of the environment's 3 tasks"),
        ("--deterministic", "orchestrator.lag = 1: deterministic = true is synchronous; set lag = 0"),
        ("--resume", "resume: runs/first has no complete checkpoint"),
        ("--resume.dir gone", "resume.dir: gone is not a directory"),
        ("--sft.data gone.jsonl", "sft.data: gone.jsonl cannot be read: No such file or directory"),
        ("--sft.data rows.jsonl --sft.batch-size 1 --trainer.parallel.data-parallel 2", "sft.batch_size = 1: fewer rows than"),
        ("--trainer.replay gone", "trainer.replay: gone holds no dumped batches"),
        ("--inference.tensor-parallel 3", "inference.tensor_parallel = 3: does not divide the model's 4 attention heads"),
        ("--inference.engines 3 --inference.port 65534", "inference.port = 65534: 3 engines counting up from it pass port 65535"),
    ],
)
def test_each_problem_is_named(place, words, problem):
    found = problems(*words.split())
    assert len(found) == 1, found
    assert problem in found[0]


def test_all_problems_are_told_at_once(place):
    found = problems("--model.path", "gone", "--orchestrator.batch-size", "10", "--trainer.loss.name", "x", "--sft.data", "no", "--resume")
    assert [problem.split(":")[0] for problem in found] == [
        "model.path",
        "orchestrator.batch_size = 10",
        "resume",
        "trainer.loss",
        "sft.data",
    ]


def test_a_low_precision_recipe_is_refused_where_its_first_step_would_fail(place, monkeypatch):
    words = ("--precision.recipe", "mxfp8", "--model.dtype", "bfloat16")
    monkeypatch.setattr(preflight, "gpu", lambda: None)
    assert problems(*words) == ["precision.recipe = 'mxfp8': needs a GPU, and this machine has none; set precision.recipe = \"none\""]
    monkeypatch.setattr(preflight, "gpu", lambda: Gpu("NVIDIA H100", (9, 0)))
    assert problems(*words)[0].startswith("precision.recipe = 'mxfp8': does not run on NVIDIA H100 (compute capability 9.0)")
    monkeypatch.setattr(preflight, "gpu", lambda: Gpu("NVIDIA B200", (10, 0)))
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert "needs transformer-engine, which is not installed" in problems(*words)[0]
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    check(*words)
    assert "set model.dtype" in problems(*words[:2], "--model.dtype", "float32")[0]


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda model: (model / "config.json").unlink(), "model.path: model has no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "model.path: model/config.json is not JSON"),
        (
            lambda model: (model / "model.safetensors").unlink(),
            "model.path: model has no model.safetensors and no",
        ),
        (
            lambda model: (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
            "model.path: model/model.safetensors is no safetensors file, or was cut short",
        ),
        (
            lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
            "model.safetensors.index.json (pytorch_model.bin is not read; convert it to safetensors)",
        ),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'),
            "model.path: model lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names",
        ),
        (
            lambda model: os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1),
            "model.path: model/model.safetensors is no safetensors file, or was cut short",
        ),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}'),
            "model.path: model/model.safetensors.index.json has no weight_map of tensors to files",
        ),
        (lambda model: (model / "chat_template.jinja").unlink(), "model.path: the tokenizer of model has no chat template"),
        (lambda model: (model / "tokenizer.json").unlink(), "model.path: model has no tokenizer (tokenizer.json"),
        (
            lambda model: (shutil.rmtree(model), write_model(model, tokens=9)),
            "model.path: model has token id 8, the model's vocab_size is only 8; use the model's own tokenizer",
        ),
        (
            lambda model: (shutil.rmtree(model), write_model(model, max_position_embeddings=32)),
            "model.context = 64: the model's max_position_embeddings is 32; lower the context",
        ),
        (lambda model: (shutil.rmtree(model), write_model(model, architectures=["MambaForCausalLM"])), "MambaForCausalLM"),
    ],
)
def test_a_broken_model_directory_is_named(place, break_it, problem):
    break_it(place / "model")
    found = problems()
    assert len(found) == 1, found
    assert problem in found[0]


def test_attention_heads_that_the_cpu_engine_lacks_are_named(place, monkeypatch):
    shutil.rmtree(place / "model")
    write_model(place / "model", head_dim=16)
    monkeypatch.setattr(preflight, "gpu_count", lambda: 0)
    assert "attention heads of size 16 do not run in vLLM's CPU engine; it has 32, 64" in problems()[0]


def test_ranks_and_engines_must_fit_the_gpus(place, monkeypatch):
    monkeypatch.setattr(preflight, "gpu_count", lambda: 1)
    assert (
        "trainer.parallel: 2 ranks on a machine with 1 GPUs"
        in problems("--trainer.parallel.data-parallel", "2", "--inference.kv-cache-gib", "1")[0]
    )
    assert "inference.kv_cache_gib: engines and trainer share the 1 GPU(s)" in problems()[0]
    check("--inference.kv-cache-gib", "1")
    monkeypatch.setattr(preflight, "gpu_count", lambda: 2)
    check()


def test_bad_sft_rows_are_named_by_line(place):
    (place / "rows.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n\n{"prompt": \n{"messages": [{"role": "user", "content": "a"}]}\n'
    )
    found = problems("--sft.data", "rows.jsonl")
    assert [problem.split(" ")[0] for problem in found] == ["rows.jsonl:3:", "rows.jsonl:4:"]
    assert "not JSON" in found[0] and "assistant" in found[1]


def test_sft_rows_are_lines_and_nothing_else_is(place):
    row = json.dumps({"prompt": "a\u2028b\x85c", "completion": "d"}, ensure_ascii=False)
    (place / "rows.jsonl").write_bytes(f"\ufeff{row}\r\n{row}".encode())
    check("--sft.data", "rows.jsonl")
    (place / "rows.jsonl").write_text(row + "\n" + "[" * 100_000)
    assert problems("--sft.data", "rows.jsonl")[0].startswith("rows.jsonl:2: maximum recursion depth exceeded")


def test_every_broken_environment_is_named_with_its_line(place):
    good = (place / "echo.py").read_text()
    (place / "echo.py").write_text("x = 1\ny = x / 0\n")
    assert problems() == ["train: source 'echo': env.path: echo.py:2: ZeroDivisionError: division by zero"]
    (place / "echo.py").write_text(good.replace("return Task(", "return None, ("))
    (place / "two.toml").write_text('[[train.source]]\nid = "a"\nenv.path = "echo.py"\n[[train.source]]\nid = "b"\nenv.path = "echo.py"\n')
    assert [problem.split(" is a ")[0] for problem in problems("@", "two.toml")] == [
        f"train: source '{name}': task 0 of env 'echo.py'" for name in "ab"
    ]


def test_a_port_in_use_is_named(place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert problems("--inference.port", str(port)) == [
            f"inference.port: 127.0.0.1:{port} cannot be listened on: Address already in use; give another port, or 0 (engine 0)"
        ]


def test_the_ranks_of_torchrun_must_fit_the_layout(place):
    check("--trainer.parallel.tensor-parallel", "2", ranks=4)
    assert "3 ranks do not divide into replicas of 2" in problems("--trainer.parallel.tensor-parallel", "2", ranks=3)[0]
    assert "data_parallel = 3, but 2 ranks make 2 replicas of 1" in problems("--trainer.parallel.data-parallel", "3", ranks=2)[0]


def test_samples_at_temperature_0_make_no_pass_at_k(place):
    (place / "eval.toml").write_text('[[eval.source]]\nid = "e"\nenv = { path = "echo.py" }\ngroup_size = 4\n')
    assert "eval.source.0.group_size = 4: samples at temperature 0 are all the same" in problems("@", "eval.toml")[0]
    check("@", "eval.toml", "--eval.sampling.temperature", "0.5")


def test_sft_and_eval_configs_are_checked_too(place):
    (place / "rl.toml").write_text('[run]\nname = "x"\n[model]\npath = "gone"\n')
    assert [p.split(":")[0] for p in problems("--sft.data", "gone", table=SftRunConfig)] == [
        "model.path",
        "trainer.micro_batch_tokens = 4096",
        "sft.data",
    ][::2]
    assert [p.split(":")[0] for p in problems("--eval.interval", "1", table=EvalRunConfig)] == ["model.path", "eval.source"]
