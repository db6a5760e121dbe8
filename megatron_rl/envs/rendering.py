"""Messages -> token ids, through the tokenizer's chat template. Sampled tokens are never tokenised again."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.base import ConfigError
from megatron_rl.envs.protocol import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Renderer:
    """Token ids of a dialogue, turn by turn.

    The dialogue's tokens are `prompt(first messages)`, what the engine sampled, `extend(...)`, what it sampled, ...
    For a template that renders an assistant turn as it was given, that is the full render of the dialogue, token for
    token. For one that rewrites earlier turns (drops what came before </think>) the engine's tokens stay as sampled.

    `stop_ids`: tokens that end a turn; the engine includes the one it stopped at in its answer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids) | ({tokenizer.eos_token_id} - {None})
        if not tokenizer.chat_template:
            raise ConfigError(f"tokenizer {tokenizer.name_or_path!r} has no chat template; add chat_template.jinja to its directory")
        if not self.stop_ids:
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r} has no eos_token, so no answer would ever end; set it in tokenizer_config.json"
            )

    @classmethod
    def load(cls, path: str, model: str | None = None) -> "Renderer":
        """The fast tokenizer of HF directory `path`, and the stop tokens of the generation_config.json of `model` (default: `path`).

        Without torch. ConfigError names what is missing.
        """
        from transformers import PreTrainedTokenizerFast

        if not (Path(path) / "tokenizer.json").is_file():
            raise ConfigError(f"{path} has no tokenizer.json; model.tokenizer (or model.path) needs an HF directory with a fast tokenizer")
        generation = Path(model or path) / "generation_config.json"
        eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
        stop_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return cls(PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True), stop_ids)

    def prompt(self, messages: list[Message]) -> list[int]:
        """Token ids of `messages` and the header of the assistant's turn: what the engine is asked to go on from."""
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))

    def extend(self, history: list[Message], messages: list[Message], last_token: int) -> list[int]:
        """Token ids that follow the assistant's sampled turn, when `messages` come next and then the assistant again.

        `history` ends with the assistant's message, `last_token` is the last token sampled in it. If that is the stop
        token with which the template closes a turn, it is not repeated. If the turn was cut by length, or ended in
        another stop token, the template's own closing tokens are added (not sampled, so never trained on).
        """
        mark = "assistantturn"
        while any(mark in message["content"] for message in (*history, *messages)):
            mark += "n"
        turn = {**history[-1], "content": mark}
        text = self.tokenizer.apply_chat_template([*history[:-1], turn, *messages], add_generation_prompt=True, tokenize=False)
        _, found, rest = text.rpartition(mark)
        if not found:
            raise ValueError("the chat template leaves out the assistant's earlier turn, so this dialogue can't be continued")
        ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        return ids[1:] if last_token in self.stop_ids and ids[:1] == [last_token] else ids

    def text(self, token_ids: list[int]) -> str:
        """The text of a sampled turn, without the stop token that ended it; other special tokens show as text."""
        end = len(token_ids) - (1 if token_ids and token_ids[-1] in self.stop_ids else 0)
        return self.tokenizer.decode(token_ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
