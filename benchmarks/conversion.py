"""HF -> Megatron -> HF against `cp` + fsync of the same bytes on the same disk, and the peak of anonymous memory.

    python benchmarks/conversion.py [--model HF_DIR] [--work DIR] [--rounds 3]

Without --model it makes a Qwen3-MoE of 64 experts and 2 GB of bfloat16. Each conversion is a process of its own; its start-up (imports) is
reported apart. Before each conversion its source is copied; prints medians and the ratio of the two: above 0.5 is what we ask for.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_rl.config.hf_directory import weight_files

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32003,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an HF directory")
    parser.add_argument("--work", type=Path, help="a directory on the disk to be measured (default: the one of temporary files)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        convert(*args.convert)
        return
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        work = Path(folder)
        model = args.model or synthetic(work / "model")
        shards = [model / name for name in weight_files(model)]
        nbytes, largest = sum(shard.stat().st_size for shard in shards), max(map(largest_tensor, shards))
        print(f"{model.name}: {nbytes / 1e9:.2f} GB in {len(shards)} file(s), largest tensor {largest / 1e6:.0f} MB")
        runs: dict[str, list[dict]] = {"hf-to-megatron": [], "megatron-to-hf": []}
        for _ in range(args.rounds):
            for direction, source, target in (("hf-to-megatron", model, "megatron"), ("megatron-to-hf", work / "megatron", "hf")):
                files = shards if direction == "hf-to-megatron" else list(source.glob("*.distcp"))
                # Both find the same free memory: a page cache that must make room first writes several times slower.
                seconds = copy(files, work / "copy")
                shutil.rmtree(work / "copy")
                runs[direction].append({"cp": seconds, **child(direction, source, work / target)})
            shutil.rmtree(work / "hf")
            shutil.rmtree(work / "megatron")
        for direction, found in runs.items():
            cp, seconds, start = (statistics.median(run[key] for run in found) for key in ("cp", "seconds", "start"))
            peak, bound = max(run["anonymous"] for run in found) / 2**30, 1.5 + 3 * largest / 2**30
            print(
                f"  {direction}  {seconds:5.2f} s  {nbytes / seconds / 1e9:4.2f} GB/s  cp + fsync {cp:5.2f} s  ratio {cp / seconds:4.2f}  "
                f"RssAnon {peak:.2f} GiB (bound {bound:.2f})  start-up {start:.1f} s"
            )


def copy(shards: list[Path], target: Path) -> float:
    target.mkdir()
    started = time.perf_counter()
    subprocess.run(["cp", *shards, target], check=True)
    for path in target.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - started


def child(direction: str, source: Path, target: Path) -> dict:
    """A conversion in a process of its own: its seconds, those of its start-up, and the peak of its RssAnon (bytes)."""
    started, peak = time.time(), 0
    command = [sys.executable, __file__, "--convert", direction, source, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            if "RssAnon:" in status:  # not of a process that has just ended
                peak = max(peak, int(status.split("RssAnon:")[1].split()[0]) * 1024)
            time.sleep(0.01)
        assert process.returncode == 0
        result = json.loads(process.stdout.read())
    return {"seconds": result["seconds"], "start": result["began"] - started, "anonymous": peak}


def convert(direction: str, source: str, target: str) -> None:
    """In the process of its own: one JSON line."""
    from rich.console import Console

    from megatron_rl.conversion import convert

    began, started = time.time(), time.perf_counter()
    convert.main(direction, Path(source), Path(target), {}, None, None, False, False, Console(quiet=True))
    print(json.dumps({"seconds": time.perf_counter() - started, "began": began}))


def synthetic(path: Path) -> Path:
    """Random bfloat16 weights of CONFIG in one file."""
    import torch

    from megatron_rl.conversion.hf_io import ShardWriter, TensorSpec
    from megatron_rl.models import qwen3_moe

    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    sizes = qwen3_moe.FAMILY.dimensions(CONFIG)
    tensors = (tensor for rule in qwen3_moe.FAMILY.tensors(CONFIG) for tensor in rule.hf)
    specs = [TensorSpec(tensor.name, tuple(sizes[dim] for dim in tensor.dims), torch.bfloat16) for tensor in tensors]
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(path / "model.safetensors", specs) as writer:
        for spec in specs:
            bits = torch.randint(-(2**15), 2**15, spec.shape, dtype=torch.int16, generator=generator)
            writer.write(spec.name, bits.view(torch.bfloat16))
    return path


def largest_tensor(shard: Path) -> int:
    with shard.open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    offsets = (entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    return max(end - start for start, end in offsets)


if __name__ == "__main__":
    main()
