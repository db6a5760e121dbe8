"""Checks a finished demo from outside: its exported model, loaded by plain transformers, on the same held-out tasks.

    python examples/reverse_text/verify_hf.py runs/demo

Decodes greedily in float32, prints the accuracy beside the run's eval_after, and exits 1 if they differ by more than a point.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from megatron_rl.config.run import RLConfig
from megatron_rl.envs.sources import Source, load_sources

BATCH = 128
TOLERANCE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"), help="a finished run with one eval source")
    run = parser.parse_args().run
    disable_progress_bar()
    if not (run / "summary.json").is_file():
        sys.exit(f"error: {run} holds no finished run (no summary.json); run examples/reverse_text/run.sh")
    summary = json.loads((run / "summary.json").read_text())
    config = RLConfig.model_validate_json((run / "configs/latest/resolved.json").read_text())
    [source] = load_sources(config.eval)
    exported = run / "hf" / f"step_{summary['steps']}"
    accuracy = exact_match(exported, source)
    difference = abs(accuracy - summary["eval_after"])
    print(f"{exported} on {len(source.indices)} held-out tasks: transformers {accuracy:.4f}, eval_after {summary['eval_after']:.4f}")
    if difference > TOLERANCE:
        sys.exit(f"error: they differ by {difference:.4f}, more than {TOLERANCE}; the exported model is not the one that was evaluated")


def exact_match(exported: Path, source: Source) -> float:
    """Share of the source's tasks that the greedy answer of the model in `exported` solves."""
    tokenizer = AutoTokenizer.from_pretrained(exported, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tasks = [source.task(i) for i in source.indices]
    solved = 0
    for start in range(0, len(tasks), BATCH):
        batch = tasks[start : start + BATCH]
        prompts = tokenizer.apply_chat_template(
            [task.messages for task in batch], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**prompts, max_new_tokens=source.sampling.max_tokens, do_sample=False)
        answers = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        solved += sum(source.env.reward(task, answer) == 1.0 for task, answer in zip(batch, answers, strict=True))
    return solved / len(tasks)


if __name__ == "__main__":
    main()
