"""The demo's parts: tokenizer, split of the words, demonstrations, config, and the check of the export."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen3ForCausalLM

from megatron_rl.config import load, validate
from megatron_rl.config.run import RLConfig
from megatron_rl.envs.rendering import Renderer
from megatron_rl.envs.sources import load_sources
from megatron_rl.trainer.conversations import load_samples

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "Spell this word backward (example: sun -> nus): "


def module(path: Path):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A working directory with runs/demo-data in it."""
    directory = tmp_path_factory.mktemp("reverse_text")
    module(EXAMPLES / "reverse_text/prepare.py").prepare(directory / "runs/demo-data", seed=0)
    return directory


@pytest.fixture
def config(workplace, monkeypatch) -> RLConfig:
    monkeypatch.chdir(workplace)
    return load.load(RLConfig, ["@", str(EXAMPLES / "reverse_text/rl.toml")]).config


def word(content: str) -> str:
    assert content.startswith(QUESTION)
    return content.removeprefix(QUESTION)


def test_every_text_survives_the_tokenizer(workplace):
    tokenizer = AutoTokenizer.from_pretrained(workplace / "runs/demo-data/model")
    for text in ("sun", "Über 東京 \N{GRINNING FACE}", " two  spaces\n", "".join(map(chr, range(256))), QUESTION + "tree"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("東京")["input_ids"]) == 6  # one token per byte of UTF-8


def test_a_dialogue_has_each_special_token_once(workplace):
    path = workplace / "runs/demo-data/model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    user, assistant, end, question = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>", QUESTION])
    s, u, n = tokenizer.convert_tokens_to_ids(["s", "u", "n"])
    assert len({user, assistant, end, question, tokenizer.pad_token_id, s, u, n}) == 8
    messages = [{"role": "user", "content": QUESTION + "sun"}]
    assert Renderer.load(str(path)).prompt(messages) == [user, question, s, u, n, end, assistant]
    answered = [*messages, {"role": "assistant", "content": "nus"}]
    whole = tokenizer.apply_chat_template(answered, tokenize=True, return_dict=False)
    assert whole == [user, question, s, u, n, end, assistant, n, u, s, end]
    assert tokenizer.eos_token_id == end
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == end


def test_no_heldout_word_is_shown_or_trained_on(config):
    data = Path("runs/demo-data")
    rows = [json.loads(line)["messages"] for line in (data / "sft.jsonl").read_text().splitlines()]
    shown = {word(user["content"]).casefold() for user, _ in rows}
    [train], [heldout] = load_sources(config.train), load_sources(config.eval)
    practised = {word(train.task(i).messages[0]["content"]).casefold() for i in range(0, len(train.indices), 10)}
    asked = {word(heldout.task(i).messages[0]["content"]).casefold() for i in heldout.indices}
    assert len(shown) > 4000 and len(practised) > 4000 and len(asked) > 400
    assert not asked & (shown | practised)
    counts = json.loads((data / "counts.json").read_text())
    assert (counts["sft_words"], counts["heldout_words_in_sft_or_rl"]) == (len(shown), 0)
    assert len(practised) <= counts["rl_words"] and len(asked) <= counts["heldout_words"]


def test_demonstrations_are_right_and_fit_the_context(config, workplace):
    prepare = module(EXAMPLES / "reverse_text/prepare.py")
    rows = [json.loads(line)["messages"] for line in Path(config.sft.data).read_text().splitlines()]
    assert all(word(user["content"]) == answer["content"][::-1] for user, answer in rows)
    assert Counter(len(answer["content"]) for _, answer in rows) == Counter(prepare.DEMONSTRATIONS)
    assert len(rows) == config.sft.steps * config.sft.batch_size  # each is seen once
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    samples = load_samples(Path(config.sft.data), tokenizer, config.model.context)
    assert all(sum(s.streams["ce_weights"]) == len(row[1]["content"]) + 1 for s, row in zip(samples, rows, strict=True))


def test_the_config_has_no_problem(config):
    assert validate.problems(config) == []
    [train], [heldout] = config.train.source, config.eval.source
    assert train.env.options["settings"] == heldout.env.options["settings"]
    assert train.env.options["heldout"] == heldout.env.options["heldout"]


def test_the_smollm2_config_lacks_only_its_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load.load(RLConfig, ["@", str(EXAMPLES / "smollm2/rl.toml")]).config
    assert all(problem.startswith("model.path: runs/smollm2-data/model is not a directory") for problem in validate.problems(config))
    [train], [heldout] = load_sources(config.train), load_sources(config.eval)
    practised = {train.task(i).messages[0]["content"] for i in train.indices}
    assert not practised & {heldout.task(i).messages[0]["content"] for i in heldout.indices}
    assert train.env.reward(train.task(0), f"So the answer is {train.env._item(train.task(0).data['item'])['answer']}.") == 1.0


def test_prepare_overwrites_nothing(workplace, monkeypatch):
    for example in ("reverse_text", "smollm2"):
        monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(workplace / "runs/demo-data")])
        with pytest.raises(SystemExit, match=r"runs/demo-data exists; delete it, or give another --out"):
            module(EXAMPLES / example / "prepare.py").main()


def test_the_same_seed_makes_the_same_data(workplace, tmp_path):
    module(EXAMPLES / "reverse_text/prepare.py").prepare(tmp_path / "again", seed=0)
    for name in ("sft.jsonl", "counts.json", "model/model.safetensors", "model/tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (workplace / "runs/demo-data" / name).read_bytes(), name


def test_verify_hf_tells_an_export_from_another_model(config, tmp_path):
    """A random model spells nothing: it confirms eval_after = 0 and contradicts 0.5."""
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"source": [small(config.eval.source[0])]})})
    run = tmp_path / "run"
    (run / "configs/latest").mkdir(parents=True)
    (run / "configs/latest/resolved.json").write_text(config.model_dump_json())
    shutil.copytree(config.model.path, run / "hf/step_3")
    Qwen3ForCausalLM.from_pretrained(run / "hf/step_3").save_pretrained(run / "hf/step_3")
    for eval_after, code in ((0.0, 0), (0.5, 1)):
        (run / "summary.json").write_text(json.dumps({"steps": 3, "eval_after": eval_after}))
        command = [sys.executable, EXAMPLES / "reverse_text/verify_hf.py", run]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        assert f"on 16 held-out tasks: transformers 0.0000, eval_after {eval_after:.4f}" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: they differ by 0.5000")


def small(source):
    """The source with 16 tasks."""
    return source.model_copy(update={"select": source.select.model_copy(update={"limit": 16})})
