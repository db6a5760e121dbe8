"""Token-exactness over turns: the oracle is the template's render of the whole dialogue."""

import pytest
from scripted_policy import TEMPLATE, byte_tokenizer, save_tokenizer

from megatron_rl.config.base import ConfigError
from megatron_rl.envs.rendering import Renderer

USER = [{"role": "user", "content": "1 + 1?"}]
TOOL = [{"role": "tool", "content": "two"}, {"role": "tool", "content": " zwei "}]
THINKING = (  # drops the thoughts of every assistant turn but the last, as Qwen3's does; opens a thought in the generation prompt
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def full(tokenizer, messages, generation=True):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=generation, tokenize=True, return_dict=False)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("following", [TOOL, TOOL[:1], [{"role": "user", "content": "sure? assistantturn"}], []])
@pytest.mark.parametrize("answer", ["2", "", "zwölf 🙂", "assistantturn", "a<|user|>b"])
def test_prompt_answer_and_extension_are_the_full_render(answer, following):
    tokenizer = byte_tokenizer()
    renderer = Renderer(tokenizer)
    sampled = [*encode(tokenizer, answer), tokenizer.eos_token_id]
    assert renderer.text(sampled) == answer
    history = [*USER, {"role": "assistant", "content": answer}]
    tokens = renderer.prompt(USER) + sampled + renderer.extend(history, following, sampled[-1])
    assert tokens == full(tokenizer, [*history, *following])


def test_a_turn_cut_by_length_is_closed_by_the_template():
    tokenizer = byte_tokenizer()
    renderer = Renderer(tokenizer)
    sampled = encode(tokenizer, "a long ans")
    assert renderer.text(sampled) == "a long ans"
    history = [*USER, {"role": "assistant", "content": "a long ans"}]
    added = renderer.extend(history, TOOL, sampled[-1])
    assert added[0] == tokenizer.eos_token_id
    assert renderer.prompt(USER) + sampled + added == full(tokenizer, [*history, *TOOL])


def test_another_stop_token_than_the_templates_stays_and_the_turn_is_closed():
    tokenizer = byte_tokenizer()
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    renderer = Renderer(tokenizer, [stop])
    sampled = [*encode(tokenizer, "2"), stop]
    assert renderer.text(sampled) == "2"
    added = renderer.extend([*USER, {"role": "assistant", "content": "2"}], TOOL, stop)
    assert added[:2] == [tokenizer.eos_token_id, *encode(tokenizer, "\n")]


def test_thoughts_that_the_template_would_drop_stay_as_sampled_once():
    tokenizer = byte_tokenizer(THINKING)
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt(USER)
    sampled = [*encode(tokenizer, "hm</think>2"), tokenizer.eos_token_id]
    added = renderer.extend([*USER, {"role": "assistant", "content": "hm</think>2"}], TOOL[:1], sampled[-1])
    assert tokenizer.decode(prompt + sampled + added) == (
        "<|user|>1 + 1?<|end|>\n<|assistant|><think>hm</think>2<|end|>\n<|tool|>two<|end|>\n<|assistant|><think>"
    )


def test_one_bos():
    tokenizer = byte_tokenizer("<|bos|>" + TEMPLATE, bos="<|bos|>")
    bos = tokenizer.convert_tokens_to_ids("<|bos|>")
    assert tokenizer("x")["input_ids"][0] == bos  # the tokenizer would add a second one
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt(USER)
    added = renderer.extend([*USER, {"role": "assistant", "content": "2"}], TOOL, tokenizer.eos_token_id)
    assert prompt[0] == bos
    assert (prompt + added).count(bos) == 1


def test_a_template_that_hides_earlier_turns_is_refused():
    renderer = Renderer(byte_tokenizer("{{ messages[-1]['content'] }}<|assistant|>"))
    with pytest.raises(ValueError, match="leaves out the assistant's earlier turn"):
        renderer.extend([*USER, {"role": "assistant", "content": "2"}], TOOL, 0)


def test_a_directory_is_loaded_with_the_stop_tokens_of_its_generation_config(tmp_path):
    path = save_tokenizer(tmp_path)
    tokenizer = byte_tokenizer()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    renderer = Renderer.load(path)
    assert renderer.stop_ids == {3, 5, tokenizer.eos_token_id}
    assert renderer.prompt(USER) == full(tokenizer, USER)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert Renderer.load(path, str(tmp_path / "model")).stop_ids == {7, tokenizer.eos_token_id}


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Renderer.load(str(tmp_path))
    tokenizer = byte_tokenizer(None)
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(tokenizer)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no eos_token"):
        Renderer(tokenizer)
