"""Composition: defaults < files left to right < command line; every mistake is reported at once, under its full key."""

import pytest

from megatron_rl.config.base import ConfigError
from megatron_rl.config.load import load
from megatron_rl.config.run import RLConfig

BASE = """
[run]
name = "first"
[model]
path = "model"
[trainer]
micro-batch-tokens = 512
[trainer.optim]
lr = 1e-4
weight_decay = 0.1
[[train.source]]
id = "one"
env = { name = "reasoning_gym", options = { "dashed-option" = 1 } }
[[train.source]]
id = "two"
env = { name = "reasoning_gym" }
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)

    def write(name, text):
        (tmp_path / name).write_text(text)

    return write


def resolve(*words):
    return load(RLConfig, ["@", "base.toml", *words]).config


def problems(*words):
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, list(words))
    return caught.value.problems


def test_files_win_over_defaults_and_later_files_over_earlier_ones(files):
    files("over.toml", "[trainer.optim]\nlr = 2e-4\n")
    config = resolve("@", "over.toml")
    assert (config.trainer.optim.lr, config.trainer.optim.weight_decay, config.trainer.optim.clip_grad) == (2e-4, 0.1, 1.0)


def test_the_command_line_wins_over_every_file_wherever_it_stands(files):
    files("over.toml", "[trainer.optim]\nlr = 2e-4\n")
    assert load(RLConfig, ["--trainer.optim.lr", "3e-4", "@", "base.toml", "@", "over.toml"]).config.trainer.optim.lr == 3e-4


def test_lists_are_replaced_whole(files):
    files("over.toml", '[[train.source]]\nid = "three"\nenv = { name = "reasoning_gym" }\n')
    assert [source.id for source in resolve("@", "over.toml").train.source] == ["three"]


def test_dashes_are_underscores_in_keys_but_not_in_free_tables(files):
    config = resolve("--orchestrator.batch-size", "16", "--inference.vllm.swap-space", "2")
    assert (config.trainer.micro_batch_tokens, config.orchestrator.batch_size) == (512, 16)
    assert (config.inference.vllm, config.train.source[0].env.options) == ({"swap-space": 2}, {"dashed-option": 1})


def test_bare_flags_are_true_and_no_flags_false(files):
    config = resolve("--deterministic", "--no-weights.verify", "--dump-batches")
    assert (config.deterministic, config.weights.verify, config.dump_batches) == (True, False, True)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("0.5", 0.5),
        ("7", 7),
        ("true", True),
        ("text", "text"),
        ('"7"', "7"),
        ("[1, 2]", [1, 2]),
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("{a = 1}", {"a": 1}),
        ("1_000", 1000),
    ],
)
def test_values_are_json_or_toml_literals_and_else_text(files, word, value):
    assert resolve("--trainer.loss.options.key", word).trainer.loss.options == {"key": value}


def test_a_text_key_keeps_its_text(files):
    assert resolve("--run.name", "12").run.name == "12"


def test_none_empties_a_key_that_may_be_absent(files):
    assert resolve("--model.tokenizer", "other", "--model.tokenizer", "none").model.tokenizer is None


def test_a_number_addresses_one_element_of_a_list(files):
    config = resolve("--train.source.1.group-size", "4", "--train.source.1.select.limit=9")
    assert [(s.group_size, s.select.limit) for s in config.train.source] == [(None, None), (4, 9)]


def test_shorthands(files):
    config = resolve("--resume", "--clean")
    assert (config.resume.enabled, config.resume.dir, config.run.clean) == (True, None, True)
    config = resolve("--resume.dir", "runs/other")
    assert (config.resume.enabled, config.resume.dir) == (True, "runs/other")
    assert load(RLConfig, ["@", "base.toml", "--dry-run"]).dry_run


def test_a_checkpoint_named_but_not_to_be_used_is_refused(files):
    files("fork.toml", '[resume]\ndir = "runs/other"\n')
    assert problems("@", "base.toml", "@", "fork.toml") == [
        "resume: dir = 'runs/other' without enabled = true would start afresh; set both, or neither (fork.toml)"
    ]


def test_a_table_given_in_part_keeps_the_defaults_of_its_place(files):
    files("over.toml", '[sft]\ndata = "rows.jsonl"\noptim = { weight_decay = 0.5 }\n[eval.sampling]\nmax_tokens = 8\n')
    config = resolve("@", "over.toml")
    assert (config.eval.sampling.temperature, config.eval.sampling.max_tokens) == (0.0, 8)
    assert (config.sft.optim.lr, config.sft.optim.weight_decay) == (1e-5, 0.5)


def test_a_source_inherits_what_its_own_sampling_does_not_give(files):
    config = resolve("--train.sampling.temperature", "0.7", "--train.source.0.sampling.max-tokens", "5")
    assert (config.train.source[0].sampling.temperature, config.train.source[0].sampling.max_tokens) == (0.7, 5)
    assert config.train.source[1].sampling is None


def test_a_resolved_config_loads_to_itself(files, tmp_path):
    config = resolve("--trainer.loss.options.eps", "0.1", "--train.source.0.sampling.max-tokens", "5")
    (tmp_path / "resolved.json").write_text(config.model_dump_json())
    assert load(RLConfig, ["--config", "resolved.json"]).config == config


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--trainer.optim.lrr", "1"], "trainer.optim.lrr: unknown key (command line); did you mean trainer.optim.lr?"),
        (["--micro-batch-tokens", "1"], "micro_batch_tokens: unknown key (command line); did you mean trainer.micro_batch_tokens?"),
        (["--train.source.0.envv.name", "x"], "train.source.0.envv: unknown key (command line); did you mean train.source.0.env?"),
        (["--train.source.2.ratio", "1"], "train.source.2: train.source has 2 elements, numbered from 0"),
        (["--trainer.steps", "many"], 'trainer.steps = "many": must be an integer (command line)'),
        (["--trainer.steps", "true"], "trainer.steps = true: must be an integer (command line)"),
        (["--trainer.steps", "2.5"], "trainer.steps = 2.5: must be an integer (command line)"),
        (["--trainer.steps"], "trainer.steps: a value must follow --trainer.steps"),
        (["--deterministic", "1"], "deterministic = 1: must be true or false (command line)"),
        (["--trainer.optim.lr", "-1"], "trainer.optim.lr = -1: must be greater than 0 (command line)"),
        (["--trainer.optim.lr", "inf"], "trainer.optim.lr = inf: must be finite (command line)"),
        (["--model.dtype", "int8"], "model.dtype = \"int8\": must be 'float32' or 'bfloat16' (command line)"),
        (["--train.group-size", "4", "--train.sampling.temperature", "0"], "source 'one': temperature 0 samples the same answer"),
        (["@", "absent.toml"], "absent.toml: cannot be read: No such file or directory"),
        (["--train.source.².ratio", "1"], "train.source = "),
        (["--trainer.steps", "9" * 5000], "must be an integer (command line)"),
        (["--seed", "1" + "0" * 40], "must be less than or equal to 2147483647 (command line)"),
        (["--run.root", ""], 'run.root = "": must have at least 1 character (command line)'),
        (["@"], "@: a file name must follow"),
        (["stray"], "'stray': write `@ file.toml` for a config file"),
    ],
)
def test_each_mistake_names_its_key_and_the_remedy(files, words, problem):
    found = problems("@", "base.toml", *words)
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed = 1\nseed = \n", "bad.toml: TOML syntax: Invalid value (at line 2, column 8)"),
        ('[trainer]\nsteps = "5"\n', 'trainer.steps = "5": must be an integer (bad.toml)'),
        ("[trainer]\nstep = 5\n", "trainer.step: unknown key (bad.toml); did you mean trainer.steps?"),
        ("trainer = 5\n", "trainer = 5:"),
        ("[trainer]\nhead-chunk-tokens = 2\nhead_chunk_tokens = 2\n", "trainer.head_chunk_tokens: given with - and with _ (bad.toml)"),
    ],
)
def test_mistakes_in_files_name_the_file(files, text, problem):
    files("bad.toml", text)
    assert problem in problems("@", "base.toml", "@", "bad.toml")[0]


def test_a_byte_order_mark_is_no_text(files):
    files("windows.toml", "\ufeffseed = 7\r\n")
    assert load(RLConfig, ["@", "base.toml", "@", "windows.toml"]).config.seed == 7


def test_all_mistakes_are_told_at_once(files):
    files("bad.toml", "[trainer]\nstep = 5\n[model]\ncontext = true\n")
    found = problems("@", "base.toml", "@", "bad.toml", "@", "absent.toml", "--seed", "-1", "--nonsense", "1")
    assert [problem.split(":")[0].split(" =")[0] for problem in found] == [
        "trainer.step",
        "absent.toml",
        "nonsense",
        "model.context",
        "seed",
    ]


def test_no_config_at_all_is_one_sentence():
    assert problems() == ["no config given: name its file, as in `@ examples/reverse_text/rl.toml` (--help lists every key)"]


def test_missing_required_keys_are_named(files):
    files("empty.toml", "seed = 1\n")
    assert problems("@", "empty.toml") == [f"{key}: required, and not given" for key in ("run", "model", "train")]
