"""Real vLLM engines for tests: a tiny model, a server on a free port, and Hugging Face in float32 as the oracle of its log-probs."""

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from megatron_rl.config.run import EvalRunConfig
from megatron_rl.inference.pool import EnginePool
from megatron_rl.inference.server import last_error

T = TypeVar("T")

SERVE = """
import sys
from megatron_rl.config.run import EvalRunConfig
from megatron_rl.inference.server import run
sys.exit(run(EvalRunConfig.model_validate_json(sys.argv[1]), 0, int(sys.argv[2])))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tiny_qwen3(directory: Path, seed: int, tied: bool = True) -> Path:
    """A random Qwen3 (0.3M parameters, fp32, vocabulary 300: not a multiple of vLLM's padding) with a byte-level tokenizer. EOS is 0."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=300, hidden_size=96, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        eos_token_id=0, pad_token_id=0, bos_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)  # peaked distributions: a wrong weight shows
            elif name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    vocabulary = {"<eos>": 0} | {symbol: i + 1 for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), eos_token="<eos>").save_pretrained(directory)
    return directory


def hf_logprobs(model_dir: Path, prompt: list[int], answer: list[int], temperature: float) -> list[float]:
    """log p(answer[i] | prompt, answer[:i]) at `temperature`, by Hugging Face in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / temperature, dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


@dataclass
class RunningEngine:
    """A server process; `call` runs a coroutine function against a pool of it."""

    url: str
    token: str
    log: Path
    process: subprocess.Popen

    def call(self, act: Callable[[EnginePool], Awaitable[T]], **options: object) -> T:
        async def inner() -> T:
            async with EnginePool([self.url], self.token, **options) as pool:
                await pool.wait_ready(300, self.died)
                return await act(pool)

        return asyncio.run(inner())

    def died(self) -> str | None:
        return last_error(self.log) if self.process.poll() is not None else None


@contextlib.contextmanager
def running_engine(model_dir: Path, work_dir: Path, **inference: object) -> Iterator[RunningEngine]:
    """Start a server for `model_dir`. It is not ready yet: `call` waits. Afterwards it is killed, and may not leave a process behind."""
    port, token = free_port(), secrets.token_hex(8)
    config = EvalRunConfig.model_validate(
        {
            "run": {"name": "engine", "root": str(work_dir)},
            "model": {"path": str(model_dir), "context": 512, "dtype": "float32"},
            "inference": {"kv_cache_gib": 0.125, "threads": 1, "max_num_seqs": 32, **inference},
            "eval": {},
        }
    )
    log = work_dir / "engine.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, config.model_dump_json(), str(port)],
            stdout=output, stderr=output, env=os.environ | {"MEGATRON_RL_TOKEN": token}, start_new_session=True,
        )  # fmt: skip
    try:
        yield RunningEngine(f"http://127.0.0.1:{port}", token, log, process)
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        _, outlived = psutil.wait_procs(family, timeout=20)
        for orphan in outlived:
            orphan.kill()
        assert not outlived, f"killing `megatron-rl inference` left processes behind: {outlived}"


@pytest.fixture(scope="session")
def engine_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one architecture (tied embeddings) with different weights."""
    root = tmp_path_factory.mktemp("models")
    return tiny_qwen3(root / "a", seed=0), tiny_qwen3(root / "b", seed=1)


@pytest.fixture(scope="session")
def engine(engine_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One engine of `engine_models`' architecture for the whole session. Users bring it to the version they need."""
    with running_engine(engine_models[0], tmp_path_factory.mktemp("engine")) as running:
        yield running
