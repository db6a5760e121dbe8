"""Our train step on documents of ragged lengths: packed, against each padded to the longest, interleaved in one process.

    python benchmarks/packing.py [--documents 64] [--longest 128] [--capacity 2048] [--steps 10] [--threads 1]

Both go through the trainer's packer with micro-batches of at most `capacity` tokens. Lengths are lognormal, as rollouts' are.
Prints real (unpadded) tokens per second of each and their ratio: above 1 means packing is faster.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("documents", 64), ("longest", 128), ("capacity", 2048), ("steps", 10), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="PASSIVE")
    lengths = document_lengths(args.documents, args.longest)
    real = int(lengths.sum())
    with tempfile.TemporaryDirectory() as directory:
        train = build(directory, args)
        steps = {"packed": train(lengths, lengths), "padded": train(lengths, np.full_like(lengths, lengths.max()))}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(args.steps + 2):
            for name, step in steps.items():
                started = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - started)
    rates = {name: real / statistics.median(values[2:]) for name, values in times.items()}
    padding = 1 - real / (lengths.max() * args.documents)
    print(f"{args.documents} documents of {lengths.min()} to {lengths.max()} tokens, {real} in all; padded: {padding:.0%} padding")
    for name, rate in rates.items():
        print(f"  {name} {rate:8.0f} real tokens/s")
    print(f"  ratio packed / padded: {rates['packed'] / rates['padded']:.2f}")


def document_lengths(documents: int, longest: int) -> np.ndarray:
    """The longest is `longest`; the median is a quarter of it."""
    lengths = np.random.default_rng(0).lognormal(np.log(longest / 4), 0.7, documents).astype(np.int64).clip(4, longest)
    lengths[0] = longest
    return lengths


def build(directory: str, args: argparse.Namespace) -> Callable[[np.ndarray, np.ndarray], Callable[[], object]]:
    """(real lengths, padded lengths) -> a function that takes one train step on such documents."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_rl import platform

    platform.install()
    from megatron_rl.algorithms import build_loss
    from megatron_rl.config.model import ModelConfig
    from megatron_rl.config.trainer import OptimConfig, SchedulerConfig, TrainerConfig
    from megatron_rl.trainer.session import open_session
    from megatron_rl.trainer.step import train_step
    from megatron_rl.transports.batches.packing import pack
    from megatron_rl.transports.batches.records import STREAMS, StepBatch, TrainingSample

    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=272,
            hidden_size=256,
            num_hidden_layers=4,
            intermediate_size=768,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
        )
    ).save_pretrained(directory)
    trainer, model = TrainerConfig(threads=args.threads), ModelConfig(path=directory, dtype="float32")
    world = platform.initialize(trainer.parallel, 0, 60.0, trainer.threads)
    session = open_session(world, model, directory, trainer, OptimConfig(lr=1e-4), SchedulerConfig(), 10**6, None)
    loss, rng = build_loss("ipo"), np.random.default_rng(0)

    def sample(number: int, real: int, padded: int) -> TrainingSample:
        streams = {row.name: np.full(padded, row.pad, row.dtype) for row in STREAMS}
        streams["token_ids"][:real] = rng.integers(0, 272, real)
        streams["ce_weights"][1:real] = 1
        return TrainingSample(str(number), str(number), streams)

    def train(real: np.ndarray, padded: np.ndarray) -> Callable[[], object]:
        samples = [sample(number, *sizes) for number, sizes in enumerate(zip(real, padded, strict=True))]
        batch = StepBatch(1, 0, pack(samples, 1, 0, capacity=args.capacity, data_parallel=1))
        return lambda: train_step(session.policy, session.optimizer, loss, batch, session.world)

    return train


if __name__ == "__main__":
    main()
