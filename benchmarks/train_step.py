"""Our train step against HF transformers: the same model, tokens, threads and optimizer, interleaved in one process.

    python benchmarks/train_step.py [--family qwen3] [--hf-experts grouped_mm] [--documents 64] [--length 32] [--steps 20] [--threads 1]

Forward, backward and AdamW on one micro-batch of equal-length documents (so that HF needs no padding either).
Prints the median seconds of each and the ratio HF / ours: above 1 means ours is faster. Mixture-of-experts families have 32 experts of
which 4 take a token; HF runs them by its default, grouped_mm, or by the loop over experts of its modelling code, eager.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

FAMILIES = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "norm_topk_prob": True},
    "glm4_moe": {
        "head_dim": 64,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 192,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
}
"""transformers' model types, and what each has beside the sizes that all share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("documents", 64), ("length", 32), ("steps", 20), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--hf-experts", choices=("grouped_mm", "batched_mm", "eager"), default="grouped_mm")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="PASSIVE", TORCH_COMPILE_DISABLE="1")
    with tempfile.TemporaryDirectory() as directory:
        theirs, ours = build_theirs(directory, args), build_ours(directory, args)
        times: dict[str, list[float]] = {"ours": [], "hf": []}
        for _ in range(args.steps + 2):
            for name, step in (("ours", ours), ("hf", theirs)):
                started = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    tokens = args.documents * args.length
    print(f"{args.family}: {args.documents} documents of {args.length} tokens, {args.threads} thread(s), median of {args.steps} steps")
    for name, seconds in medians.items():
        print(f"  {name:5s} {seconds * 1e3:8.1f} ms  {tokens / seconds:8.0f} tokens/s")
    print(f"  ratio hf / ours: {medians['hf'] / medians['ours']:.2f}")


def tokens_of(args: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 272, (args.documents, args.length), dtype=np.int32)


def build_theirs(directory: str, args: argparse.Namespace) -> Callable[[], object]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        args.family,
        vocab_size=272,
        hidden_size=256,
        num_hidden_layers=4,
        intermediate_size=768,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **FAMILIES[args.family],
    )
    experts = {"experts_implementation": args.hf_experts} if args.family.endswith("moe") else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **experts)
    model.save_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    tokens = torch.from_numpy(tokens_of(args)).long()

    def step() -> None:
        optimizer.zero_grad()
        logprobs = torch.log_softmax(model(tokens).logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def build_ours(directory: str, args: argparse.Namespace) -> Callable[[], object]:
    from megatron_rl import platform

    platform.install()
    from megatron_rl.algorithms import build_loss
    from megatron_rl.config.model import ModelConfig
    from megatron_rl.config.trainer import OptimConfig, SchedulerConfig, TrainerConfig
    from megatron_rl.trainer.session import open_session
    from megatron_rl.trainer.step import train_step
    from megatron_rl.transports.batches.records import STREAMS, MicroBatch, StepBatch

    model = ModelConfig(path=directory, dtype="float32")
    trainer, optim = TrainerConfig(threads=args.threads), OptimConfig(lr=1e-4)
    world = platform.initialize(trainer.parallel, 0, 60.0, trainer.threads)
    session = open_session(world, model, directory, trainer, optim, SchedulerConfig(), 10**6, None)
    streams = {row.name: np.full(args.documents * args.length, row.pad, row.dtype) for row in STREAMS}
    streams["token_ids"] = tokens_of(args).ravel()
    streams["ce_weights"].reshape(args.documents, args.length)[:, 1:] = 1
    cu_seqlens = np.arange(0, args.documents * args.length + 1, args.length, dtype=np.int32)
    micro_batch = MicroBatch(1, 0, cu_seqlens, streams, {"ce": float(streams["ce_weights"].sum())})
    batch, loss = StepBatch(1, 0, [micro_batch]), build_loss("ipo")
    return lambda: train_step(session.policy, session.optimizer, loss, batch, session.world)


if __name__ == "__main__":
    main()
