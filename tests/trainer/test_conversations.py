"""SFT rows: what is trained on is exactly what the assistant said, end of turn included."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.base import ConfigError
from megatron_rl.trainer.conversations import load_samples, render
from megatron_rl.trainer.sft import draw

TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + '.' + '\n' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token per character; "." ends a turn."""
    characters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz<>./ \n")}
    raw = Tokenizer(models.WordLevel(characters, unk_token="/"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=".", chat_template=TEMPLATE)


def text(tokenizer, tokens, mask, on):
    return "".join(tokenizer.convert_ids_to_tokens([t for t, m in zip(tokens, mask, strict=True) if m == on]))


def test_only_assistant_tokens_up_to_end_of_turn_are_trained(tokenizer):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "so"},
    ]
    tokens, mask = render(messages, tokenizer)
    assert text(tokenizer, tokens, mask, 1) == "yo.so."
    assert text(tokenizer, tokens, mask, 0) == "<u>hi.\n<a>\n<u>and.\n<a>\n"


def test_every_bad_row_is_named_by_file_and_line(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        json.dumps({"prompt": "a", "completion": "b"}),
        "{not json",
        json.dumps({"messages": [{"role": "user", "content": "a"}]}),
        json.dumps({"messages": [{"role": "assistant", "content": 3}]}),
        json.dumps({"prompt": "a" * 60, "completion": "b"}),
        json.dumps({"messages": [{"role": "assistant", "content": "b"}]}),
        json.dumps({"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]}),
    ]
    path.write_text("\n".join(rows))
    with pytest.raises(ConfigError) as caught:
        load_samples(path, tokenizer, context=40)
    lines = caught.value.problems
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{n}" for n in (2, 3, 4, 5, 6, 7)]
    assert "no assistant message" in lines[1] and "messages[0] must have" in lines[2] and "do not fit model.context = 40" in lines[3]
    assert "messages[0] is the assistant's" in lines[4] and "the chat template refuses it: no tools" in lines[5]


def test_rows_become_cross_entropy_samples(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "bc"}) + "\n")
    (sample,) = load_samples(path, tokenizer, context=40)
    assert sample.streams["rl_weights"].sum() == 0
    assert text(tokenizer, sample.streams["token_ids"].tolist(), sample.streams["ce_weights"].astype(int).tolist(), 1) == "bc."


def test_each_epoch_draws_every_row_once_in_its_own_order():
    first, second = ([draw(7, 3, i) for i in range(e * 7, e * 7 + 7)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second and np.array_equal(first, [draw(7, 3, i) for i in range(7)])
