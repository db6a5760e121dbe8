import pytest

from megatron_rl.config.base import ConfigError
from megatron_rl.config.sources import EnvConfig, EvalSourcesConfig, TrainSourcesConfig
from megatron_rl.envs.registry import load_environment
from megatron_rl.envs.sources import load_sources

ECHO = """
from dataclasses import dataclass
from megatron_rl.envs.protocol import Environment, Task

@dataclass
class Echo(Environment):
    tasks: int = 10
    def __len__(self): return self.tasks
    def task(self, index):
        if index == 9: raise LookupError("row 9 is damaged")
        if index == 8: return "eight"
        if index == 7: return Task("7", ["say it"])
        return Task(str(index), [{"role": "user", "content": "say it"}] if index else [])

def load(**options): return Echo(**options)
"""


def write(tmp_path, text):
    (tmp_path / "echo.py").write_text(text)
    return EnvConfig(path=str(tmp_path / "echo.py"))


def test_a_users_file_is_loaded_with_its_options(tmp_path):
    config = write(tmp_path, ECHO)
    assert len(load_environment(config)) == 10
    assert len(load_environment(config.model_copy(update={"options": {"tasks": 3}}))) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"echo.py defines no load\(\)"),
        ("x = 1\nx +\n", r"echo.py:2: SyntaxError"),
        ("import nonexistent_module\n", r"echo.py:1: ModuleNotFoundError: No module named 'nonexistent_module'"),
        ("def load(**o):\n    return o['words']\n", r"echo.py:2: KeyError: 'words'"),
        ("def load(): return 3\n", r"load\(\) in .*echo.py returned int, not a megatron_rl.envs.protocol.Environment"),
        (ECHO.replace("tasks: int = 10", "tasks: int = 0"), "has no tasks"),
        (
            ECHO.replace("return self.tasks", "return self.rows"),
            "its __len__ failed: AttributeError: 'Echo' object has no attribute 'rows'",
        ),
        (ECHO.replace("return self.tasks", "return 2.5"), "its __len__ failed: TypeError"),
        (ECHO.replace("Echo(**options)", "Echo"), r"echo.py returned the class Echo, not a megatron_rl.envs.protocol.Environment"),
        ("import sys\nsys.exit(0)\n", "echo.py:2: SystemExit: 0"),
    ],
)
def test_what_is_wrong_with_it_is_said_in_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_environment(write(tmp_path, text))
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_file_and_an_unknown_name(tmp_path):
    with pytest.raises(ConfigError, match=r"env.path: .*nowhere.py is not a file"):
        load_environment(EnvConfig(path=str(tmp_path / "nowhere.py")))
    with pytest.raises(ConfigError, match=r"env.name: unknown environment 'reasoning-gym': did you mean 'reasoning_gym'\?"):
        load_environment(EnvConfig(name="reasoning-gym"))


def sources(tmp_path, table=TrainSourcesConfig, **select):
    env = write(tmp_path, ECHO).model_dump()
    return load_sources(table.model_validate({"group_size": 5, "source": [{"id": "echo", "env": env, "select": select}]}))


def test_skip_and_limit_choose_from_the_environments_own_order(tmp_path):
    assert sources(tmp_path)[0].indices == range(10)
    assert sources(tmp_path, skip=3)[0].indices == range(3, 10)
    assert sources(tmp_path, skip=3, limit=4)[0].indices == range(3, 7)
    assert sources(tmp_path, skip=8, limit=4)[0].indices == range(8, 10)
    with pytest.raises(ConfigError, match=r"source 'echo': select.skip = 10 leaves none of the environment's 10 tasks"):
        sources(tmp_path, skip=10)


def test_defaults_come_from_the_table(tmp_path):
    train, held = sources(tmp_path)[0], sources(tmp_path, EvalSourcesConfig)[0]
    assert (train.group_size, train.sampling.temperature, train.timeout_s) == (5, 1.0, 120.0)
    assert (held.group_size, held.sampling.temperature) == (5, 0.0)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (9, "task 9 of env .*LookupError: row 9 is damaged"),
        (8, "is a str"),
        (7, "messages must be a"),
        (0, "messages must be a non-empty list"),
    ],
)
def test_a_task_that_cannot_be_made_names_source_and_index(tmp_path, index, message):
    with pytest.raises(ConfigError, match=message) as error:
        sources(tmp_path)[0].task(index)
    assert "source 'echo'" in str(error.value)


def test_all_sources_problems_come_at_once(tmp_path):
    bad = [{"id": name, "env": {"path": str(tmp_path / f"{name}.py")}} for name in ("a", "b")]
    with pytest.raises(ConfigError) as error:
        load_sources(TrainSourcesConfig.model_validate({"source": bad}))
    assert [p.split(":")[0] for p in error.value.problems] == ["source 'a'", "source 'b'"]
