"""One stock vLLM server: its command line, its environment, and the process that watches it.

The engine starts on random weights (`--load-format dummy`): the first weights come as a verified version like all others, so that a
checkpoint is not read twice and what is served is always what a manifest vouches for. Until then `guard` refuses to sample.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_rl.config.base import ConfigError
from megatron_rl.config.inference import InferenceConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.run import EvalRunConfig, RLConfig
from megatron_rl.inference.guard import TOKEN_VARIABLE, WATCHER_VARIABLE
from megatron_rl.platform.parent_death import die_with_parent
from megatron_rl.precision import IGNORED

MODULE = "vllm.entrypoints.openai.api_server"
CPU_BATCHED_TOKENS = 4096
"""Prompt tokens that a CPU engine takes up in one step, when the context is no longer."""
ONLINE_QUANTIZATIONS = ("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "mxfp4")
"""Of inference.vllm.quantization: they take every linear that they are not told to leave (vLLM 0.32, config/quantization.py)."""
NO_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ERROR_LINE = re.compile(r"^(?:\S*(?:Error|Exception)|api_server\.py: error)\b.*:\s.+")


def arguments(
    inference: InferenceConfig, model: ModelConfig, *, port: int, seed: int, deterministic: bool, device_type: str
) -> dict[str, Any]:
    """vLLM's arguments by long name; True is a bare flag. Raises ConfigError where inference.vllm names one that is set here."""
    ours: dict[str, Any] = {
        "model": model.path,
        "host": inference.host,
        "port": port,
        "dtype": model.dtype,
        "max-model-len": model.context,
        "seed": seed,
        "load-format": "dummy",
        "tokenizer": model.tokenizer_path,  # only for its end-of-sequence token; requests do not detokenize
        "enable-scale-out": True,
        "logprobs-mode": "processed_logprobs",
        "tensor-parallel-size": inference.tensor_parallel,
        "max-num-seqs": inference.max_num_seqs,
        "enforce-eager": inference.enforce_eager,
        "enable-prefix-caching": not deterministic,
        "weight-transfer-config": {"backend": "filesystem"},
        "worker-extension-cls": "megatron_rl.inference.worker.WeightsExtension",
        "middleware": "megatron_rl.inference.guard.Guard",
        "enable-log-requests": False,
        "disable-log-stats": True,
        "disable-uvicorn-access-log": True,
        "disable-fastapi-docs": True,
    }
    defaults: dict[str, Any] = {}
    if device_type == "cpu":
        # A prompt cut in two rewinds its request's generator, which torch's CPU generators can't (vLLM 0.32: "does not use offset").
        ours["enable-chunked-prefill"] = False
        defaults["max-num-batched-tokens"] = max(model.context, CPU_BATCHED_TOKENS)
    kv_cache_gib = inference.kv_cache_gib or (1.0 if device_type == "cpu" else None)
    if kv_cache_gib is not None:
        ours["kv-cache-memory-bytes"] = int(kv_cache_gib * 2**30)
    given = {name.strip("-").replace("_", "-"): value for name, value in inference.vllm.items()}
    if clashes := sorted(name for name in given if name.removeprefix("no-") in ours):
        raise ConfigError(
            f"inference.vllm sets {', '.join(map(repr, clashes))}, which megatron_rl sets itself; remove it and use the keys of "
            "[inference], [model] or the top level"
        )
    if given.get("quantization") in ONLINE_QUANTIZATIONS:
        defaults["quantization-config"] = {"ignore": list(IGNORED)}
    return defaults | ours | given


def command(arguments: dict[str, Any]) -> list[str]:
    """The command that starts a server with these arguments."""
    line = [sys.executable, "-m", MODULE]
    for name, value in arguments.items():
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return line


def environment(inference: InferenceConfig, *, engine_index: int, device_type: str, cores: list[int]) -> dict[str, str]:
    """What the server's environment has beyond ours. `cores` are the CPUs that this process may use."""
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "PYTHONWARNINGS": "ignore",
    }
    if device_type == "cpu":
        mine = _cores_of(engine_index, inference.threads or len(cores), cores)
        if inference.tensor_parallel == 1:
            # The worker lives in the engine process: one import of vLLM less, no shared-memory spinning between the two.
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            variables |= {"OMP_NUM_THREADS": str(len(mine)), "OMP_WAIT_POLICY": "PASSIVE"}
        else:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = omp_binding(mine, inference.tensor_parallel)
    return variables


def omp_binding(cores: list[int], workers: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND: each worker's cores, "0,1|2,3". Cores are shared where there are fewer than workers."""
    shares = [cores[worker::workers] or [cores[worker % len(cores)]] for worker in range(workers)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _cores_of(engine_index: int, threads: int, cores: list[int]) -> list[int]:
    """The cores of one engine: consecutive engines take consecutive cores, starting over when they run out."""
    return [cores[(engine_index * threads + i) % len(cores)] for i in range(min(threads, len(cores)))]


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"inference.port: {host}:{port} cannot be listened on: {error.strerror}; give another port, or 0") from error


def run(config: RLConfig | EvalRunConfig, engine_index: int, port: int) -> int:
    """Serve until the server ends or a signal ends it; its exit code. vLLM's log goes to our output, or to a file if that is a terminal.

    The server dies with this process, and its children with it. Raises ConfigError before anything is started.
    """
    inference = config.inference
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: give engines and orchestrator the same random string in it")
    check_port(inference.host, port)
    device_type = _device_type()
    deterministic = isinstance(config, RLConfig) and config.deterministic
    line = command(arguments(inference, config.model, port=port, seed=config.seed, deterministic=deterministic, device_type=device_type))
    more = environment(inference, engine_index=engine_index, device_type=device_type, cores=sorted(os.sched_getaffinity(0)))
    log = Path(config.run.dir) / "logs" / f"inference_{engine_index}.log" if sys.stdout.isatty() else None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"engine {engine_index}: serving {config.model.path} at http://{inference.host}:{port}, log in {log}", flush=True)
    return _watch(line, os.environ | more, log, f"engine {engine_index}")


def _device_type() -> str:
    """platform.device().type, asked of another process: this one stays without torch (150 MB) for as long as it watches."""
    question = "from megatron_rl.platform import device; print(device().type)"
    return subprocess.run([sys.executable, "-c", question], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _watch(line: list[str], variables: dict[str, str], log: Path | None, name: str) -> int:
    output = open(log, "ab") if log is not None else None  # noqa: SIM115 - held by the child until it ends
    variables = variables | {WATCHER_VARIABLE: str(os.getpid())}
    server = subprocess.Popen(line, env=variables, stdout=output, stderr=output, preexec_fn=die_with_parent())
    asked_to_end = False

    def end(signum: int, _: Any) -> None:
        nonlocal asked_to_end
        asked_to_end = True
        server.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, end)
    code = server.wait()
    if asked_to_end:
        return 0
    reason = f": {last_error(log)}" if log is not None else ""
    print(f"{name}: the vLLM server ended with exit code {code}{reason}", file=sys.stderr, flush=True)
    return 2 if code == 2 else 1


def last_error(log: Path) -> str:
    """The last line of a server's log that names an error, else its last line: why a server ended."""
    lines = [NO_COLOUR.sub("", text).strip() for text in log.read_text(errors="replace").splitlines()[-400:]]
    lines = [re.sub(r"^\(.*?\)\s*(ERROR\s+\S+\s+\S+\s+\[\S+\]\s*)?", "", text) for text in lines if text]
    named = [text for text in lines if ERROR_LINE.match(text) and "Engine core initialization failed" not in text]
    return (named or lines or ["its log is empty"])[-1][:500]
