"""`megatron-rl`: reads the command line and dispatches.

Exit codes: 2 the user's mistake (`error: ...` lines), 1 ours (one line; the traceback is in a log), 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.base import ConfigError, Table
from megatron_rl.config.load import load
from megatron_rl.config.parity import ParityConfig
from megatron_rl.config.run import EvalRunConfig, RLConfig, SftRunConfig
from megatron_rl.launch.exit_codes import run_process

Runner = Callable[[Any, argparse.Namespace, list[str]], None]


@dataclass(frozen=True)
class Option:
    """A word of one subcommand that is not a config key."""

    name: str
    """--word; without dashes the option is told by its place."""
    metavar: str
    """Empty: a flag."""
    doc: str
    type: type = str
    required: bool = False
    repeat: bool = False
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Subcommand:
    """What `--help` says of a subcommand, what it reads, and what it runs."""

    name: str
    purpose: str
    run: Runner
    config: type[Table] | None
    """Of the default kind of config; `kinds` has all that it can be given."""
    about: str
    examples: tuple[str, ...]
    options: tuple[Option, ...] = ()
    kinds: dict[str, type[Table]] = field(default_factory=dict)
    files: bool = True
    """Whether the config may come from files and has a dry run; without, every key is a word of the command line."""

    def all_options(self) -> tuple[Option, ...]:
        kind = Option(
            "--kind", "|".join(self.kinds), f"what the config is of (default: {next(iter(self.kinds), '')})", choices=tuple(self.kinds)
        )
        return (*self.options, kind) if self.kinds else self.options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_process(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> None:
    from megatron_rl import cli_help  # rich, and nothing else

    if not words or words[0] in ("-h", "--help", "help"):
        cli_help.overview(list(SUBCOMMANDS.values()))
        return
    if words[0] == "--version":
        cli_help.version()
        return
    name, rest = words[0], words[1:]
    if name not in SUBCOMMANDS:
        raise ConfigError(f"unknown subcommand {name!r}; known: {', '.join(SUBCOMMANDS)} (megatron-rl --help)")
    subcommand = SUBCOMMANDS[name]
    if "-h" in rest or "--help" in rest:
        cli_help.subcommand(subcommand)
        return
    options, rest = _options(subcommand, rest)
    if subcommand.config is None:
        if rest:
            raise ConfigError(f"{name} takes no arguments, got {' '.join(rest)}")
        subcommand.run(None, options, words)
        return
    if not subcommand.files and (not rest or {"@", "--config", "--dry-run"} & set(rest)):
        raise ConfigError(f"{name} reads its settings from the command line alone, as in: {subcommand.examples[0]}")
    invocation = load(subcommand.kinds.get(getattr(options, "kind", None) or "", subcommand.config), rest)
    if invocation.dry_run:
        from rich.console import Console

        from megatron_rl.launch import plan, preflight

        plan.show(invocation.config, Console())
        preflight.check(invocation.config)
        return
    subcommand.run(invocation.config, options, words)


def _options(subcommand: Subcommand, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(prog=f"megatron-rl {subcommand.name}", add_help=False, allow_abbrev=False)
    for option in subcommand.all_options():
        if not option.name.startswith("-"):
            parser.add_argument(option.name, metavar=option.metavar, choices=option.choices)
            continue
        if not option.metavar:
            parser.add_argument(option.name, action="store_true")
            continue
        parser.add_argument(
            option.name,
            type=option.type,
            required=option.required and "--dry-run" not in words,
            action="append" if option.repeat else "store",
            choices=option.choices,
        )
    return parser.parse_known_args(words)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{message} ({self.prog} --help)")


def _train(config: RLConfig | SftRunConfig, options: argparse.Namespace, words: list[str]) -> None:
    from rich.console import Console

    if "RANK" in os.environ:
        from megatron_rl.launch.torchrun import main
    elif isinstance(config, SftRunConfig):
        from megatron_rl.launch.sft import main
    else:
        from megatron_rl.launch.local import main
    main(config, words, Console())


def _eval(config: EvalRunConfig, options: argparse.Namespace, words: list[str]) -> None:
    from rich.console import Console

    from megatron_rl.launch import eval as evaluation

    evaluation.main(config, words, Console())


def _trainer(config: RLConfig | SftRunConfig, options: argparse.Namespace, words: list[str]) -> None:
    from megatron_rl.launch import trainer_process

    trainer_process.main(config, options.stage or "rl", options.batches)


def _orchestrator(config: RLConfig, options: argparse.Namespace, words: list[str]) -> None:
    from megatron_rl.launch import orchestrator_process

    orchestrator_process.main(config, options.engine, options.batches)


def _inference(config: RLConfig | EvalRunConfig, options: argparse.Namespace, words: list[str]) -> None:
    from megatron_rl.launch import inference_process

    inference_process.main(config, options.engine_index or 0, options.port)


def _parity(config: ParityConfig, options: argparse.Namespace, words: list[str]) -> None:
    from megatron_rl.launch import parity

    parity.main(config, options.json)


def _convert(config: None, options: argparse.Namespace, words: list[str]) -> None:
    from rich.console import Console

    from megatron_rl.conversion import convert

    given = {option.name.removeprefix("--").replace("-", "_") for option in LAYOUT}
    layout = {name: value for name, value in vars(options).items() if name in given and value is not None}
    hf_dir = Path(options.model) if options.model else None
    convert.main(
        options.direction,
        Path(options.source),
        Path(options.destination),
        layout,
        hf_dir,
        options.quantize,
        options.resume,
        options.verify,
        Console(),
    )


def _doctor(config: None, options: argparse.Namespace, words: list[str]) -> None:
    from rich.console import Console

    from megatron_rl.launch import doctor

    doctor.main(Console())


def _numbers(word: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, word.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is no list of whole numbers such as 17,13") from None


LAYOUT = (
    *(
        Option(f"--{name.replace('_', '-')}", "N", doc, type=int)
        for name, doc in (
            ("tensor_parallel", "cut tensors for N tensor ranks (default: 1). A layout only decides which bytes lie together"),
            ("pipeline_parallel", "files of N pipeline stages"),
            ("virtual_pipeline_parallel", "with N layer chunks each"),
            ("expert_parallel", "files of N expert ranks"),
            ("expert_tensor_parallel", "cut experts for N ranks (default: as tensor_parallel)"),
        )
    ),
    Option("--pipeline-layers", "N,N,...", "layers of every chunk, where they are not to be alike", type=_numbers),
)
BATCHES = Option("--batches", "ADDRESS", "where batches are served: tcp://HOST:PORT, or a directory")
RECIPES = ("fp8", "fp8_blockwise", "nvfp4", "mxfp8")
DIRECTIONS = ("hf-to-megatron", "megatron-to-hf", "reshard")
SUBCOMMANDS = {
    command.name: command
    for command in (
        Subcommand(
            "rl",
            "Reinforcement learning, everything on this machine: engines, trainer ranks, orchestrator.",
            _train,
            RLConfig,
            "Starts one vLLM server per inference.engines, the trainer ranks of [trainer.parallel] and one orchestrator, watches them "
            "and ends them together. With an [sft] table the warm-up trains while the engines start. Under torchrun every rank becomes "
            "a trainer rank and rank 0 starts the rest. Everything is written to <run.root>/<run.name>/.",
            (
                "megatron-rl rl @ examples/reverse_text/rl.toml",
                "megatron-rl rl @ base.toml @ large.toml --trainer.optim.lr 1e-5 --run.name lr-1e-5",
                "megatron-rl rl @ rl.toml --dry-run          # resolved config and placement; touches nothing",
                "megatron-rl rl @ rl.toml --resume           # from the last complete checkpoint",
                "megatron-rl rl @ rl.toml --run.name fork --resume.dir runs/first",
                "torchrun --nproc-per-node 2 examples/pretrain_rl.sh rl.toml --trainer.parallel.tensor-parallel 2",
            ),
        ),
        Subcommand(
            "sft",
            "Supervised fine-tuning on JSONL conversations.",
            _train,
            SftRunConfig,
            "Trains on assistant tokens of packed conversations and exports the result as a Hugging Face directory, <run>/hf/sft.",
            ("megatron-rl sft @ sft.toml", "megatron-rl sft @ sft.toml --sft.steps 200 --trainer.parallel.data-parallel 2"),
        ),
        Subcommand(
            "eval",
            "Evaluate a Hugging Face model directory on held-out tasks.",
            _eval,
            EvalRunConfig,
            "Starts an engine for model.path, runs every [[eval.source]], prints a table and writes <run>/eval/results.json.",
            ("megatron-rl eval @ eval.toml", "megatron-rl eval @ eval.toml --model.path runs/first/hf/step_100 --run.name first-100"),
        ),
        Subcommand(
            "trainer",
            "One trainer rank (RANK, WORLD_SIZE, MASTER_ADDR, ... in the environment, as torchrun sets them).",
            _trainer,
            RLConfig,
            "What `rl` starts per rank; start it alone to place ranks yourself.",
            ("torchrun --nproc-per-node 2 --no-python megatron-rl trainer @ rl.toml --batches tcp://10.0.0.1:5555",),
            (Option("--stage", "sft|rl", "which stage to train (default: rl)", choices=("sft", "rl")), BATCHES),
            {"rl": RLConfig, "sft": SftRunConfig},
        ),
        Subcommand(
            "orchestrator",
            "The orchestrator: tasks, rollouts, advantages, batches, weight updates.",
            _orchestrator,
            RLConfig,
            "One CPU process, no torch. Needs running engines, and MEGATRON_RL_TOKEN as theirs.",
            ("megatron-rl orchestrator @ rl.toml --engine http://10.0.0.2:8000 --batches tcp://10.0.0.1:5555",),
            (
                Option("--engine", "URL", "a running engine; repeat for each", required=True, repeat=True),
                Option("--batches", BATCHES.metavar, BATCHES.doc, required=True),
            ),
        ),
        Subcommand(
            "inference",
            "One vLLM engine that takes weight updates.",
            _inference,
            RLConfig,
            "A stock vLLM server with our worker extension. It holds random weights until the first update.",
            ("megatron-rl inference @ rl.toml --port 8000",),
            (
                Option("--engine-index", "I", "its number among the run's engines (default: 0)", type=int),
                Option("--port", "P", "where it listens (default: inference.port)", type=int),
            ),
            {"rl": RLConfig, "eval": EvalRunConfig},
        ),
        Subcommand(
            "parity",
            "Compare a Hugging Face model on any parallel layout with transformers.",
            _parity,
            ParityConfig,
            "Starts the ranks of the layout and one process of transformers, gives both the same random tokens, and compares log-probs, "
            "entropy, loss, every parameter's gradient and, after --steps, every parameter. Exit code 1 where a difference exceeds its "
            "bound. Needs no tokenizer and leaves nothing behind.",
            (
                "megatron-rl parity --model Qwen3-0.6B",
                "megatron-rl parity --model Qwen3-0.6B --tensor-parallel 2 --context-parallel 2 --packed --steps 2",
                "megatron-rl parity --model GLM-4.5-Air-tiny --expert-parallel 2 --pipeline-parallel 2 --virtual-pipeline-parallel 2",
            ),
            (Option("--json", "", "the numbers as JSON on standard output, instead of the table"),),
            files=False,
        ),
        Subcommand(
            "convert",
            "Convert weights between Hugging Face and Megatron checkpoints, or cut a checkpoint for another layout.",
            _convert,
            None,
            "Streams tensor by tensor without building the model, and keeps every bit. megatron-to-hf and reshard also take training "
            "checkpoints (runs/<name>/checkpoints/step_<n>). DST appears when it is whole; until then there is DST.partial.",
            (
                "megatron-rl convert hf-to-megatron Qwen3-30B-A3B qwen3-megatron --tensor-parallel 2 --expert-parallel 8",
                "megatron-rl convert megatron-to-hf qwen3-megatron qwen3-hf --verify",
                "megatron-rl convert megatron-to-hf runs/first/checkpoints/step_100 first-100",
                "megatron-rl convert megatron-to-hf qwen3-megatron qwen3-fp8 --quantize fp8_blockwise",
                "megatron-rl convert reshard qwen3-megatron qwen3-pp4 --pipeline-parallel 4",
            ),
            (
                Option("direction", "DIRECTION", "hf-to-megatron, megatron-to-hf or reshard", required=True, choices=DIRECTIONS),
                Option("source", "SRC", "the directory that is read", required=True),
                Option("destination", "DST", "the directory that is made; must not exist", required=True),
                *LAYOUT,
                Option("--model", "HF_DIR", "where a training checkpoint's config and tokenizer are (default: its run's model.path)"),
                Option("--quantize", "RECIPE", "megatron-to-hf: weights as fp8, fp8_blockwise, nvfp4 or mxfp8", choices=RECIPES),
                Option("--resume", "", "continue DST.partial of a conversion that was cut short"),
                Option("--verify", "", "read DST again and compare every tensor before it appears"),
            ),
        ),
        Subcommand(
            "doctor", "What is installed here, what this machine can run, and the remedies.", _doctor, None, "", ("megatron-rl doctor",)
        ),
    )
}


if __name__ == "__main__":
    sys.exit(main())
