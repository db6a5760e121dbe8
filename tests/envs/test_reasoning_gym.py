import re

import pytest

from megatron_rl.config.base import ConfigError
from megatron_rl.config.sources import EnvConfig
from megatron_rl.envs.reasoning_gym import extract, is_heldout, load, same
from megatron_rl.envs.registry import load_environment

SETTINGS = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "operators": ["+"], "allow_parentheses": False}
ADD = {"task": "basic_arithmetic", "settings": SETTINGS}


def words(**options):
    env = load(size=200, settings={"min_word_len": 3, "max_word_len": 4}, **options)
    return {env.task(i).messages[0]["content"].casefold() for i in range(len(env))}


def test_no_held_out_question_is_drawn_in_training_whatever_the_seed():
    train = set.union(*(words(seed=seed, split="train") for seed in range(6)))
    heldout = set.union(*(words(seed=seed, split="heldout") for seed in range(6)))
    assert not train & heldout
    assert len(train) > 500 and len(heldout) > 100
    assert not any(is_heldout(question, 0.1) for question in train)
    assert all(is_heldout(question, 0.1) for question in heldout)


def test_the_split_does_not_see_case_and_has_its_share():
    assert {is_heldout(q, 0.3) for q in ("Spell: Straße", "SPELL: STRASSE", "spell: strasse")} in ({True}, {False})
    assert 0.08 < sum(is_heldout(f"question {i}", 0.1) for i in range(5000)) / 5000 < 0.12


def test_all_is_both_splits():
    everything = words(seed=0, split="all")
    assert any(is_heldout(q, 0.1) for q in everything) and not all(is_heldout(q, 0.1) for q in everything)


def test_a_task_is_the_same_each_time_and_ids_are_unique():
    one, two = load(size=50, seed=3), load(size=50, seed=3)
    assert [one.task(i) for i in reversed(range(50))][::-1] == [two.task(i) for i in range(50)]
    assert len({one.task(i).id for i in range(50)}) == 50
    with pytest.raises(IndexError):
        one.task(50)


def test_neighbouring_seeds_share_no_run_of_tasks():
    """reasoning-gym draws item i with Random(seed + i): seeds 1 and 2 as they are would share 49 of 50 items."""
    drawn = [[load(size=50, seed=seed).task(i).messages[0]["content"] for i in range(50)] for seed in (1, 2)]
    assert len(set(drawn[0]) & set(drawn[1])) < 5


def test_exact_and_partial_scoring():
    exact, partial = load(size=5), load(size=5, scoring="score")
    task = exact.task(2)
    word = task.messages[0]["content"].rsplit(" ", 1)[1]
    right = word[::-1]
    assert exact.reward(task, f" {right}\n") == 1.0
    assert exact.reward(task, right[:-1]) == 0.0
    assert exact.reward(task, "") == 0.0
    assert partial.reward(task, right) == 1.0
    assert 0 < partial.reward(task, right[:-1]) < 1


def test_the_prompt_holds_the_question():
    task = load(size=3, prompt="{question}\nAnswer {briefly}.", **ADD).task(0)
    content = task.messages[0]["content"]
    assert content.endswith("\nAnswer {briefly}.") and "+" in content


@pytest.mark.parametrize(
    ("how", "reply", "answer"),
    [
        ("full", " 4 \n", "4"),
        ("last_number", "2 + 2 is 4, no: -1,005.50.", "-1005.50"),
        ("last_number", "none", None),
        ("last_line", "so\n\n 4 \n\n", "4"),
        ("last_line", " \n", None),
        ("tag", "<answer>3</answer> no, <answer>\n4\n</answer>!", "4"),
        ("tag", "<answer>4", None),
    ],
)
def test_extraction(how, reply, answer):
    assert extract(reply, how) == answer


def test_numbers_are_equal_by_value_and_other_answers_as_text():
    assert same("4.0", "4") and same("-0", "0") and same("abc", "abc")
    assert not same("4.01", "4") and not same("Abc", "abc") and not same("1e3", "1000")


def test_a_number_in_a_sentence_scores():
    env = load(size=3, answer="last_number", **ADD)
    task = env.task(0)
    a, b = map(int, re.findall(r"\d+", task.messages[0]["content"]))
    assert env.reward(task, f"The sum is {a + b}.") == 1.0
    assert env.reward(task, f"{a + b} or {a + b + 1}") == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "spell_backwards"}, r"unknown task 'spell_backwards': did you mean 'spell_backward'\?"),
        ({"settings": {"min_word_length": 3}}, r"unknown setting 'min_word_length': did you mean 'min_word_len'\?"),
        ({"settings": {"min_word_len": 9, "max_word_len": 3}}, "AssertionError: max_word_len must be >= min_word_len"),
        ({"seeds": 1}, r"unknown key 'seeds': did you mean 'seed'\?"),
        ({"prompt": "hi"}, r"reasoning_gym.prompt: must contain \{question\}"),
        ({"split": "test"}, "reasoning_gym.split: Input should be 'train', 'heldout' or 'all'"),
        ({"heldout": 0.0}, "reasoning_gym.heldout: Input should be greater than 0"),
        ({"task": "rush_hour"}, 'has no single answer; use scoring = "score"'),
        ({"settings": {"min_word_len": 40, "max_word_len": 41}}, "can't generate item 0 with these settings: IndexError"),
        (ADD | {"split": "heldout", "heldout": 1e-4, "size": 1}, "too few different questions for heldout = 0.0001"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        load(**options)


def test_every_task_of_the_list_generates_and_knows_its_answer():
    """A handful of quite different generators, through the split, with their own scorer."""
    for name in ("chain_sum", "letter_counting", "gsm_symbolic", "word_ladder", "simple_equations", "countdown"):
        env = load(task=name, size=4, split="heldout", scoring="score")
        for i in range(4):
            task = env.task(i)
            entry = env._item(task.data["item"])
            assert env.reward(task, entry["answer"]) == 1.0, name


def test_the_registry_loads_it_by_name():
    env = load_environment(EnvConfig(name="reasoning_gym", options={"size": 7}))
    assert len(env) == 7 and env.task(6).id.startswith("spell_backward-0-")
