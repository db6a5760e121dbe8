"""The command line and environment of a server, and what is refused before one is started."""

import json
import socket

import pytest

from megatron_rl.config.base import ConfigError
from megatron_rl.config.inference import InferenceConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.run import EvalRunConfig
from megatron_rl.inference.server import arguments, check_port, command, environment, last_error, omp_binding, run

MODEL = ModelConfig(path="/models/tiny", context=512, dtype="float32")


def line_of(inference: InferenceConfig, deterministic: bool = False, device_type: str = "cpu") -> list[str]:
    return command(arguments(inference, MODEL, port=8123, seed=5, deterministic=deterministic, device_type=device_type))


def value(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


def test_the_engine_follows_the_config():
    line = line_of(InferenceConfig(tensor_parallel=2, max_num_seqs=64, kv_cache_gib=0.5))
    expected = {
        "--model": "/models/tiny",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--dtype": "float32",
        "--max-model-len": "512",
        "--seed": "5",
        "--tensor-parallel-size": "2",
        "--max-num-seqs": "64",
        "--kv-cache-memory-bytes": "536870912",
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": '{"backend": "filesystem"}',
        "--load-format": "dummy",
    }
    assert {name: value(line, name) for name in expected} == expected
    assert {"--enforce-eager", "--enable-scale-out", "--enable-prefix-caching"} <= set(line)


def test_deterministic_runs_have_no_prefix_cache():
    assert "--no-enable-prefix-caching" in line_of(InferenceConfig(), deterministic=True)


def test_cpu_engines_never_cut_a_prompt():
    line = line_of(InferenceConfig())
    assert "--no-enable-chunked-prefill" in line and int(value(line, "--max-num-batched-tokens")) >= 512
    assert "--no-enable-chunked-prefill" not in line_of(InferenceConfig(), device_type="cuda")


def test_kv_cache_has_a_default_on_cpu_only():
    assert value(line_of(InferenceConfig()), "--kv-cache-memory-bytes") == str(2**30)
    assert "--kv-cache-memory-bytes" not in line_of(InferenceConfig(), device_type="cuda")


def test_further_arguments_are_passed_on():
    line = line_of(InferenceConfig(vllm={"max_num_batched_tokens": 1024, "disable-cascade-attn": True, "hf-overrides": {"a": 1}}))
    assert value(line, "--max-num-batched-tokens") == "1024"
    assert "--disable-cascade-attn" in line
    assert value(line, "--hf-overrides") == '{"a": 1}'


def test_an_engine_that_quantises_leaves_what_the_trainer_leaves():
    ignore = json.loads(value(line_of(InferenceConfig(vllm={"quantization": "fp8_per_block"})), "--quantization-config"))["ignore"]
    assert {"*.mlp.gate", "*.in_proj_ba"} <= set(ignore)
    own = InferenceConfig(vllm={"quantization": "fp8_per_block", "quantization-config": {"ignore": ["x"]}})
    assert json.loads(value(line_of(own), "--quantization-config")) == {"ignore": ["x"]}
    for quantization in ({}, {"quantization": "modelopt"}):
        assert "--quantization-config" not in line_of(InferenceConfig(vllm=quantization))


@pytest.mark.parametrize("name", ["max-model-len", "max_model_len", "--seed", "no-enforce-eager", "middleware"])
def test_arguments_that_are_ours_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"inference.vllm sets '{name.strip('-').replace('_', '-')}'") as caught:
        line_of(InferenceConfig(vllm={name: 1}))
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_one_worker_shares_the_engine_process_with_its_threads():
    variables = environment(InferenceConfig(threads=3), engine_index=1, device_type="cpu", cores=[0, 1, 2, 3])
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert environment(InferenceConfig(), engine_index=0, device_type="cpu", cores=[4, 7])["OMP_NUM_THREADS"] == "2"


def test_tensor_parallel_workers_get_cores_of_their_own_where_there_are_enough():
    assert omp_binding([0, 1, 2, 3], 2) == "0,2|1,3"
    assert omp_binding([5], 2) == "5|5"
    variables = environment(InferenceConfig(tensor_parallel=2, threads=2), engine_index=1, device_type="cpu", cores=[0, 1, 2, 3])
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(InferenceConfig(), engine_index=0, device_type="cuda", cores=[0])


def test_a_port_in_use_is_found_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_RL_TOKEN", "t")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = EvalRunConfig.model_validate({"run": {"name": "r", "root": str(tmp_path)}, "model": {"path": "m"}, "eval": {}})
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on: Address already in use"):
            run(config, 0, port)
    check_port("127.0.0.1", port)
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_a_token_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("MEGATRON_RL_TOKEN", raising=False)
    config = EvalRunConfig.model_validate({"run": {"name": "r", "root": str(tmp_path)}, "model": {"path": "m"}, "eval": {}})
    with pytest.raises(ConfigError, match="MEGATRON_RL_TOKEN is not set"):
        run(config, 0, 0)


def test_the_last_error_of_a_log_is_its_cause(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "(APIServer pid=12) INFO 11-29 23:17:10 [launcher.py:195] Route: /v1/models\n"
        "\x1b[0;36m(EngineCore pid=90)\x1b[0;0m ERROR 11-29 23:17:29 [core.py:99] Traceback (most recent call last):\n"
        "\x1b[0;36m(EngineCore pid=90)\x1b[0;0m ERROR 11-29 23:17:29 [core.py:99] ValueError: No available memory for the cache blocks.\n"
        "(APIServer pid=12) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_error(log) == "ValueError: No available memory for the cache blocks."
    log.write_text("usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --swap-spice 3\n")
    assert last_error(log) == "api_server.py: error: unrecognized arguments: --swap-spice 3"
    log.write_text("")
    assert last_error(log) == "its log is empty"
