""".metadata is a pickle: only a checkpoint's own classes are made from it."""

import os
import pickle

import pytest

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.metadata import read_metadata


class _Attack:
    def __reduce__(self):
        return os.mkdir, (self.path,)

    def __init__(self, path):
        self.path = path


def test_a_pickle_that_calls_anything_is_refused_and_nothing_runs(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Attack(str(tmp_path / "broken-in"))))
    with pytest.raises(ConfigError, match=r"\.metadata: refers to posix\.mkdir, which no checkpoint needs"):
        read_metadata(tmp_path)
    assert not (tmp_path / "broken-in").exists()


@pytest.mark.parametrize("name", ["builtins eval", "torch load", "torch.serialization load", "torch.distributed.checkpoint.metadata os"])
def test_functions_beside_the_allowed_names_are_refused(name, tmp_path):
    (tmp_path / ".metadata").write_bytes(b"c" + name.replace(" ", "\n").encode() + b"\n.")
    with pytest.raises(ConfigError, match="which no checkpoint needs"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", pickle.dumps({"a": 1}), b"not a pickle"])
def test_damaged_metadata_is_one_line(content, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match=r"\.metadata: damaged") as caught:
        read_metadata(tmp_path)
    assert "\n" not in str(caught.value)
