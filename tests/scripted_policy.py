"""Engines, trainer and tokenizer in the place of the real ones, for tests of the state machines around them.

The real engines are used in the end-to-end tests.
"""

import asyncio
import random
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from megatron_rl.envs.protocol import Completion, Environment, Task

TURNS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def byte_tokenizer(template=TEMPLATE, bos=None):
    """Bytes, and the markers of the template. <|end|> is eos. `bos` adds a BOS by post-processing, as Llama's does."""
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|end|>", "<|stop|>", *([bos] if bos else [])]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", bos_token=bos)
    fast.chat_template = template
    return fast


def save_tokenizer(directory: Path) -> str:
    byte_tokenizer().save_pretrained(str(directory))
    return str(directory)


class ScriptedPool:
    """Answers are `answer(prompt text, seed)`; each request takes a random number of event-loop turns, up to `jitter`.

    Every request is recorded. A rollout's tokens carry the version held when it was answered, or both versions if there
    was an update meanwhile.
    """

    def __init__(self, answer, jitter=0, seed=0, version=None):
        self.tokenizer = byte_tokenizer()
        self.answer, self.jitter, self.random, self.version = answer, jitter, random.Random(seed), version
        self.requests, self.inflight, self.most_inflight = [], 0, 0

    async def sample(self, session_id, prompt, max_tokens, temperature, seed, cache_salt):
        assert self.version is not None
        self.requests.append({"session": session_id, "seed": seed, "salt": cache_salt, "temperature": temperature, "max": max_tokens})
        self.inflight += 1
        self.most_inflight = max(self.most_inflight, self.inflight)
        before = self.version
        try:
            for _ in range(self.random.randint(0, self.jitter)):
                await asyncio.sleep(0)
            text = self.answer(self.tokenizer.decode(prompt), seed)
            if asyncio.iscoroutine(text):
                text = await text
        finally:
            self.inflight -= 1
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        half = len(ids) // 2
        spans = [(before, 0, len(ids))] if before == self.version or half == 0 else [(before, 0, half), (self.version, half, len(ids))]
        return Completion(ids, [-0.5] * len(ids), reason, spans)

    async def update_weights(self, version_dir):
        self.version = int(Path(version_dir).name)


class ScriptedTrainer:
    """Trains one batch after another, `delay` milliseconds each, and offers weights/<v> after batch v; keeps the batches."""

    def __init__(self, run_dir: Path, start=0, delay=0):
        self.weights, self.batches, self.delay, self.tasks = Path(run_dir) / "weights", [], delay, []
        self.training = asyncio.Lock()
        shutil.rmtree(self.weights, ignore_errors=True)
        self._offer(start)

    async def publish(self, batch):
        self.batches.append(batch)
        self.tasks.append(asyncio.create_task(self._train(batch.step)))

    async def _train(self, step):
        async with self.training:
            await asyncio.sleep(0.001 * self.delay)
            self._offer(step)

    def _offer(self, version):
        (self.weights / str(version)).mkdir(parents=True)


class Guess(Environment):
    """Task i asks for the digit i % 10."""

    def __init__(self, tasks=40):
        self.tasks = tasks

    def __len__(self):
        return self.tasks

    def task(self, index):
        return Task(f"guess-{index}", [{"role": "user", "content": f"guess {index}"}], {"digit": str(index % 10)})

    def reward(self, task, answer):
        return float(answer == task.data["digit"])
