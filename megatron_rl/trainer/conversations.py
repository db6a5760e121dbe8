"""SFT rows -> token ids with a mask over what the assistant said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from megatron_rl.config.base import ConfigError
from megatron_rl.transports.batches.records import TrainingSample


def load_samples(path: Path, tokenizer: Any, context: int) -> list[TrainingSample]:
    """Every row of the JSONL file, rendered with the chat template. ConfigError lists every bad row by its line."""
    samples, problems = [], []
    for number, line in rows(path):
        try:
            tokens, mask = render(row_messages(json.loads(line)), tokenizer)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        if len(tokens) > context:
            problems.append(f"{path}:{number}: {len(tokens)} tokens do not fit model.context = {context}; shorten the row or raise it")
            continue
        samples.append(
            TrainingSample(
                f"sft/{number}",
                f"sft/{number}",
                {
                    "token_ids": np.array(tokens, np.int32),
                    "rl_weights": np.zeros(len(tokens), np.float32),
                    "ce_weights": np.array(mask, np.float32),
                },
            )
        )
    if problems:
        raise ConfigError(*problems[:20], *([f"{path}: and {len(problems) - 20} more bad rows"] if len(problems) > 20 else []))
    if not samples:
        raise ConfigError(f"{path}: no rows")
    return samples


def rows(path: Path) -> list[tuple[int, str]]:
    """(number, text) of every line that is not blank. A byte order mark is no text, and U+2028 and the like end no line."""
    lines = path.read_text("utf-8-sig").split("\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def row_messages(row: Any) -> list[dict[str, str]]:
    """{"messages": [...]} or {"prompt", "completion"} -> messages. ValueError says what is wrong."""
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('expected {"messages": [{"role", "content"}, ...]} or {"prompt": "...", "completion": "..."}')
    for i, message in enumerate(messages):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise ValueError(f"messages[{i}] must have a string role and a string content")
    if messages[0]["role"] == "assistant":
        raise ValueError("messages[0] is the assistant's: its tokens would have no prompt; start with another role")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant message: nothing to train on")
    return messages


def render(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """(token ids, mask): 1 on assistant tokens up to and including the end-of-turn token.

    Each assistant turn must extend the rendering before it token by token; a template that rewrites earlier turns
    (dropped <think> blocks, say) is a ValueError.
    """
    tokens: list[int] = []
    mask: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template_ids(messages[:i], tokenizer, add_generation_prompt=True)
        whole = template_ids(messages[: i + 1], tokenizer, add_generation_prompt=False)
        if prompt[: len(tokens)] != tokens or whole[: len(prompt)] != prompt:
            raise ValueError(f"the chat template rewrites what came before messages[{i}]: its tokens can't be told from the prompt's")
        answer = whole[len(prompt) :]
        end = len(answer) - answer[::-1].index(tokenizer.eos_token_id) if tokenizer.eos_token_id in answer else len(answer)
        mask += [0] * (len(prompt) - len(mask)) + [1] * end + [0] * (len(answer) - end)
        tokens = whole
    return tokens, mask


def template_ids(messages: list[dict[str, str]], tokenizer: Any, add_generation_prompt: bool) -> list[int]:
    """ValueError says why the chat template refuses these messages (roles that do not alternate, say)."""
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False))
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from error
