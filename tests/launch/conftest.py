"""A place to launch from: a model directory, an environment, SFT rows and an rl.toml that names them."""

import json

import pytest
from model_directory import write_model

RL = """
[run]
name = "first"
[model]
path = "model"
context = 64
[trainer]
micro_batch_tokens = 64
[orchestrator]
batch_size = 8
[train]
group_size = 4
sampling = { max_tokens = 16 }
[[train.source]]
id = "echo"
env = { path = "echo.py" }
[eval]
sampling = { max_tokens = 16 }
"""
ECHO = """
from megatron_rl.envs.protocol import Environment, Task

class Echo(Environment):
    def __len__(self):
        return 3

    def task(self, index):
        return Task(str(index), [{"role": "user", "content": "say it"}])

def load():
    return Echo()
"""
ROWS = [{"prompt": "a", "completion": "b"}, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with everything that RL names, as the working directory."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "rl.toml").write_text(RL)
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path
