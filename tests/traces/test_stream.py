import json

import numpy as np
import pytest

from megatron_rl.traces.records import Rollout
from megatron_rl.traces.stream import TraceStream, read


def rollout(name, text="hi"):
    return Rollout(
        rollout_id=name,
        source="s",
        task_id="t",
        group_id="g",
        token_ids=np.array([5, 6, 7], np.int32),
        sampled=np.array([False, True, True]),
        logprobs=np.array([0.0, -0.123456789, -1.0], np.float32),
        versions=[(2, 1, 3)],
        temperature=1.0,
        reward=0.0,
        finish_reason="stop",
        messages=[{"role": "user", "content": text}],
    )


def write(path, *names):
    stream = TraceStream(path)
    for name in names:
        stream.append(rollout(name), kind="train", step=1, fate="shipped", advantage=0.5)
    stream.close()


def names(path):
    return [row["rollout_id"] for row in read(path)]


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "traces" / "stream.jsonl"
    write(path, "a")
    (row,) = read(path)
    assert row["token_ids"] == [5, 6, 7] and row["sampled"] == [0, 1, 1] and row["versions"] == [[2, 1, 3]]
    assert row["logprobs"] == [0.0, -0.123457, -1.0]
    assert (row["kind"], row["step"], row["fate"], row["advantage"], row["reward"]) == ("train", 1, "shipped", 0.5, 0.0)


@pytest.mark.parametrize("cut", [1, 2, 50])
def test_a_torn_tail_is_left_out_and_cut_off_when_writing_goes_on(tmp_path, cut):
    path = tmp_path / "stream.jsonl"
    write(path, "a", "b")
    path.write_bytes(path.read_bytes()[:-cut])
    assert names(path) == ["a"]
    write(path, "c")
    assert names(path) == ["a", "c"]


def test_a_file_that_is_one_torn_line_longer_than_a_block(tmp_path):
    path = tmp_path / "stream.jsonl"
    path.write_bytes(b'{"rollout_id": "' + b"x" * 200_000)
    assert names(path) == []
    write(path, "a")
    assert names(path) == ["a"]


def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "stream.jsonl"
    write(path, "a", "b")
    lines = path.read_bytes().splitlines()
    path.write_bytes(lines[0][:-9] + b"\n" + lines[1] + b"\n")
    with pytest.raises(ValueError, match=r"stream.jsonl:1: not a JSON line"):
        names(path)


def test_any_text_is_one_line(tmp_path):
    path = tmp_path / "stream.jsonl"
    stream = TraceStream(path)
    text = "a\nb\u2028c 漢字 \ud83d"  # a newline, a line separator, and half a surrogate pair
    stream.append(rollout("a", text), kind="eval", step=0, fate="greedy")
    stream.close()
    assert len(path.read_bytes().splitlines()) == 1
    assert next(read(path))["messages"][0]["content"] == text


def test_numbers_that_json_lacks_are_refused(tmp_path):
    stream = TraceStream(tmp_path / "stream.jsonl")
    with pytest.raises(ValueError, match="Out of range float"):
        stream.append(rollout("a"), kind="train", step=1, fate="shipped", advantage=float("nan"))
    stream.close()
    assert json.loads("[]") == list(read(stream.path))
