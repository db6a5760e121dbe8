"""One short check of a GPU: stack, parity, loss gap of low-precision recipes, speed of the train step -> docs/gpu/<name>.md.

    python tools/gpu_check.py [--steps 200] [--out docs/gpu]        # some minutes on one H200
    python tools/gpu_check.py --cpu --out DIR                        # the same code on a CPU: tiny sizes, torch layers, no recipes

Parity: tiny float32 models of each family; log-probs against transformers, and gradients of TransformerEngine against torch layers.
Loss gap: a Qwen3 trained on a noisy Markov chain in bfloat16 and with every recipe this GPU runs; same weights, same batches.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import tiny_models  # noqa: E402

from megatron_rl import conversion, models, platform, precision  # noqa: E402
from megatron_rl.config.model import ModelConfig  # noqa: E402
from megatron_rl.config.precision import PrecisionConfig  # noqa: E402
from megatron_rl.config.trainer import OptimConfig, ParallelConfig, SchedulerConfig, TrainerConfig  # noqa: E402
from megatron_rl.platform import devices, stack  # noqa: E402

RECIPES = ("none", "delayed", "current", "blockwise", "mxfp8", "nvfp4")
DOCUMENTS = (48, 16, 64)
SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4}
SMALL |= {"head_dim": 64, "vocab_size": 4096, "initializer_range": 0.02}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu")
    args = parser.parse_args()
    gpu = stack.gpu()
    if args.cpu == (gpu is not None):
        parser.error("--cpu is for machines without a GPU" if gpu else "there is no GPU here; --cpu runs the same code without one")
    platform.install()
    world = platform.initialize(ParallelConfig(), seed=0, timeout_s=120.0)
    name = gpu.name if gpu else "CPU"
    page = [f"# {name}", "", "Written by `tools/gpu_check.py`.", ""]
    page += ["## Stack", *table(("component", "version", "here"), [(c.name, c.version, c.enables) for c in stack.stack_report()])]
    with tempfile.TemporaryDirectory() as folder:
        page += ["## Parity, float32", *table(("family", "layers", "log-probs vs HF", "gradients vs torch layers"), parity(Path(folder)))]
        sizes, steps, tokens = (TINY, args.steps or 4, 256) if args.cpu else (SMALL, args.steps or 200, 16384)
        rows = list(training(Path(folder) / "trained", sizes, steps, tokens, gpu, world))
    page += [f"## Training, {steps} steps of {tokens} tokens"]
    page += table(("recipe", "first loss", "last loss", "gap to bfloat16", "tokens/s"), rows)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name.lower().replace(' ', '_')}.md"
    path.write_text("\n".join(page).rstrip() + "\n")
    print(path)
    world.shutdown()


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A Markdown table with a blank line around it."""
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)), ""]


def backends() -> list[str]:
    """Torch layers everywhere, TransformerEngine's where the platform would choose them."""
    return ["torch"] if platform.layer_backend() == "torch" else ["torch", "transformer_engine"]


def parity(folder: Path) -> list[tuple[str, ...]]:
    """Rows: family, layers, largest difference of a log-prob from HF's, relative difference of the gradient from the torch layers'."""
    rows = []
    for family, write in tiny_models.FAMILIES.items():
        hf = write(folder / family).to(platform.device())
        tokens = torch.randint(0, hf.config.vocab_size, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(0)).to(platform.device())
        with torch.no_grad():
            expected = torch.cat([log_probs(hf(document[None]).logits[0], document) for document in tokens.split(DOCUMENTS)])
        gradients: dict[str, Tensor] = {}
        for backend in backends():
            with mock.patch.object(devices, "layer_backend", lambda backend=backend: backend):
                found, gradient = forward_backward(folder / family, tokens)
            gradients = gradients or gradient
            apart = sum((gradient[name] - gradients[name]).square().sum() for name in gradients).sqrt()
            size = sum(value.square().sum() for value in gradients.values()).sqrt()
            rows.append((family, backend, f"{(found - expected).abs().max():.1e}", f"{apart / size:.1e}"))
    return rows


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token after the first, given those before it."""
    return logits[:-1].float().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def forward_backward(directory: Path, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the packed documents' tokens, and the gradient of their sum by canonical name."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_rl.conversion.live import live_tensors

    policy = models.build(str(directory), TrainerConfig(), "float32")
    conversion.load_hf(policy, directory)
    (model,) = policy.chunks
    offsets = torch.tensor([0, *DOCUMENTS], device=tokens.device).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=max(DOCUMENTS), max_seqlen_kv=max(DOCUMENTS)
    )
    positions = torch.cat([torch.arange(length, device=tokens.device) for length in DOCUMENTS])[None]
    found, _ = model(tokens[None], positions, tokens.roll(-1)[None], torch.ones_like(positions, dtype=torch.float32), packed)
    predicted = torch.cat([document[:-1] for document in found.split(DOCUMENTS)])
    predicted.sum().backward()
    return predicted.detach(), {name: p.grad for name, p in live_tensors(policy, model).items() if p.grad is not None}


def training(directory: Path, sizes: dict, steps: int, tokens: int, gpu: stack.Gpu | None, world: platform.World) -> Iterator[tuple]:
    """Rows: recipe, loss of the first step, mean loss of the last quarter, its difference from the first row's, tokens per second."""
    tiny_models.write_qwen3(directory, tied=True, **sizes)
    dtype, capability = ("bfloat16", gpu.capability) if gpu else ("float32", None)
    reference = None
    for recipe in RECIPES:
        config = PrecisionConfig(recipe=recipe)
        if problems := precision.check(config, gpu.name if gpu else "a CPU", capability):
            yield recipe, "", "", problems[0].partition(": ")[2], ""
            continue
        losses, speed = train(directory, dtype, config, sizes["vocab_size"], steps, tokens, world)
        last = statistics.mean(losses[-max(1, steps // 4) :])
        reference = last if reference is None else reference
        yield dtype if recipe == "none" else recipe, f"{losses[0]:.4f}", f"{last:.4f}", f"{last - reference:+.4f}", f"{speed:,.0f}"


def train(
    directory: Path, dtype: str, config: PrecisionConfig, vocab: int, steps: int, tokens: int, world: platform.World
) -> tuple[list[float], float]:
    """Loss of every step, and tokens per second of the median step."""
    from megatron_rl.algorithms import build_loss
    from megatron_rl.trainer.session import open_session
    from megatron_rl.trainer.step import train_step

    gc.collect()
    model, optim = ModelConfig(path=str(directory), dtype=dtype), OptimConfig(lr=3e-4)
    session = open_session(world, model, str(directory), TrainerConfig(), optim, SchedulerConfig(), steps, None, config)
    losses, times = [], []
    for step in range(1, steps + 1):
        batch = markov_batch(vocab, tokens, step)
        started = time.perf_counter()
        metrics = train_step(session.policy, session.optimizer, build_loss("ipo"), batch, world)
        times.append(time.perf_counter() - started)
        losses.append(metrics["loss/total"])
    return losses, tokens / statistics.median(times[len(times) // 4 :])


def markov_batch(vocab: int, tokens: int, step: int) -> "StepBatch":  # noqa: F821
    """One micro-batch of eight documents whose next token is 5 x + 3 (mod vocab), or, one time in ten, any."""
    from megatron_rl.transports.batches.records import STREAMS, MicroBatch, StepBatch

    rng, documents, length = np.random.default_rng(step), 8, tokens // 8
    ids = rng.integers(0, vocab, (documents, length))
    for i in range(1, length):
        ids[:, i] = np.where(rng.random(documents) < 0.1, ids[:, i], (5 * ids[:, i - 1] + 3) % vocab)
    streams = {row.name: np.full(tokens, row.pad, row.dtype) for row in STREAMS}
    streams["token_ids"] = ids.astype(np.int32).ravel()
    streams["ce_weights"].reshape(documents, length)[:, 1:] = 1
    offsets = np.arange(0, tokens + 1, length, dtype=np.int32)
    return StepBatch(step, step - 1, [MicroBatch(step, step - 1, offsets, streams, {"ce": float(streams["ce_weights"].sum())})])


if __name__ == "__main__":
    main()
