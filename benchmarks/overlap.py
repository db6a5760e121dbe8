"""How well generation and training overlap in a finished run, and where a step's time goes.

    python benchmarks/overlap.py runs/demo

overlap = 1 - (seconds the trainer waited for batches) / (seconds of all steps), the first step left out: it waits for the engine's first
batch. With two processes on the same cores it can't reach 1: it says who waits, not how busy the machine is.
"""

import json
import sys
from pathlib import Path

PARTS = ("wait_batch", "forward_backward", "optimizer", "weight_update", "checkpoint")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lines = [json.loads(line) for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line][1:]
    if not steps:
        sys.exit(f"{sys.argv[1]}: fewer than two steps in metrics.jsonl")
    total = sum(line["time/step"] for line in steps)
    print(
        f"{len(steps)} steps, {total / len(steps):.3f} s each, {sum(line['tokens/trained'] for line in steps) / total:.0f} sampled tokens/s"
    )
    for part in PARTS:
        seconds = sum(line.get(f"time/{part}", 0.0) for line in steps)
        print(f"  {part:17s} {seconds / len(steps):7.3f} s  {100 * seconds / total:5.1f} %")
    print(f"  overlap {1 - sum(line['time/wait_batch'] for line in steps) / total:.3f}")


if __name__ == "__main__":
    main()
