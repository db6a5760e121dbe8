"""Whole runs on a tiny model: `megatron-rl rl` as a user starts it."""

import json
import os
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.launch.process_groups import MARKER, Process, processes

CONFIG = """
seed = 3
[run]
name = "tiny"
[model]
path = "model"
context = 64
dtype = "float32"
[sft]
data = "rows.jsonl"
steps = 3
batch_size = 8
[trainer]
steps = 2
micro_batch_tokens = 256
checkpoint = { interval = 1 }
[inference]
kv_cache_gib = 0.1
max_num_seqs = 16
[orchestrator]
batch_size = 8
max_inflight = 16
[train]
group_size = 4
sampling = { max_tokens = 8 }
[[train.source]]
id = "vowels"
env = { path = "vowels.py" }
[eval]
sampling = { max_tokens = 8 }
[[eval.source]]
id = "held_out"
env = { path = "vowels.py" }
select = { limit = 4 }
"""
ENVIRONMENT = '''
from megatron_rl.envs.protocol import Environment, Task

class Vowels(Environment):
    """Rewards the share of vowels, so that groups differ from the start."""

    def __len__(self):
        return 20

    def task(self, index):
        return Task(str(index), [{"role": "user", "content": f"vowels {index}"}])

    def reward(self, task, answer):
        return sum(letter in "aeiouAEIOU" for letter in answer) / 8

def load():
    return Vowels()
'''
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEADLINE_S = 420
"""Of a whole launch on a loaded machine of two cores."""


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {**EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "Glm4Moe": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True,
                "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0},
}  # fmt: skip
"""transformers' class names, and what their configs add to SIZES."""


def prepare(place: Path, family: str = "Qwen3") -> None:
    """Everything that CONFIG names, in `place`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<eos>", "<user>", "<assistant>", *string.printable[:95]]
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", additional_special_tokens=["<user>", "<assistant>"]
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=len(symbols), **SIZES, **FAMILIES[family])
    getattr(transformers, f"{family}ForCausalLM")(config).float().save_pretrained(place / "model")
    fast.save_pretrained(place / "model")
    (place / "rl.toml").write_text(CONFIG)
    (place / "vowels.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"vowels {i}", "completion": "aeiou"} for i in range(16)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Launch:
    """One `megatron-rl rl @ rl.toml ...` in `place`."""

    def __init__(self, place: Path, *words: str, prefix: tuple[str, ...] = ("-m", "megatron_rl.cli", "rl", "@")) -> None:
        self.run = place / "runs" / "tiny"
        self.log = place / f"console_{len(list(place.glob('console_*')))}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *prefix, "rl.toml", *words],
                cwd=place,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run in the background
            )

    @property
    def console(self) -> str:
        return self.log.read_text()

    def lines(self) -> list[dict]:
        """Of metrics.jsonl."""
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition) -> None:
        """AssertionError when the run ends first."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended first:\n{self.console}"
            assert time.monotonic() < deadline, f"the event did not happen:\n{self.console}"
            time.sleep(0.05)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def find(self, word: str) -> Process:
        """The one process of this run whose command line or title has `word`."""
        found = [process for process in self.members() if word in process.title]
        assert len(found) == 1, (word, found)
        return found[0]

    def members(self) -> list[Process]:
        """Living processes that this launch started, the launcher not included."""
        sessions = {self.process.pid}
        for process in processes():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_text()
                parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid and (MARKER in environment or "watchdog" in process.title):
                sessions.add(process.pid)
        self.sessions = getattr(self, "sessions", set()) | sessions
        return [process for process in processes() if process.session in self.sessions and process.pid != self.process.pid]
