"""What a finished run says of itself: summary.json, plots, and the lines on the console. Numbers worked out by hand."""

import io
import json

from rich.console import Console

from megatron_rl.launch import metrics_file, plots, summary
from megatron_rl.launch.display import Display

LINES = [
    {"step": 0, "eval/a/exact_match": 0.25, "eval/b/exact_match": 0.75, "time/eval": 2.0},
    {"step": 1, "reward/mean": 0.1, "reward/std": 0.2, "loss/total": 0.5, "tokens/trained": 100, "time/step": 4.0, "time/wait_batch": 1.0},
    {"step": 2, "reward/mean": 0.3, "reward/std": 0.2, "loss/total": 0.25, "tokens/trained": 100, "time/step": 2.0, "staleness/mean": 1},
    {"step": 2, "eval/a/exact_match": 1.0, "eval/b/exact_match": 0.5, "time/eval": 3.0},
]


def write(path, lines):
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_summary_has_the_first_and_the_last_evaluation_and_the_time_of_each_phase(tmp_path):
    write(tmp_path, LINES)
    clock = summary.Clock()
    clock.seconds = {"rl": 20.0, "setup": 1.0}
    written = summary.write(tmp_path, clock)
    assert json.loads((tmp_path / "summary.json").read_text()) == written
    assert written.pop("wall_seconds") >= 0
    # means over the sources; the evaluations' 2 + 3 seconds are not counted as rl
    assert written == {"eval_before": 0.5, "eval_after": 0.75, "steps": 2, "phases": {"setup": 1.0, "rl": 15.0, "eval": 5.0}}


def test_numbers_that_do_not_apply_are_absent(tmp_path):
    write(tmp_path, LINES[1:2])
    found = summary.summarize(tmp_path, summary.Clock())
    assert set(found) == {"steps", "wall_seconds", "phases"}


def test_a_step_made_again_after_a_resume_counts_once_as_made_last(tmp_path):
    write(tmp_path, [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}, {"step": 2, "reward/mean": 0.9}])
    steps, _ = metrics_file.read(tmp_path / "metrics.jsonl")
    assert [line["reward/mean"] for line in steps] == [0.1, 0.9]


def test_a_line_still_being_written_is_left_for_the_next_look(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = metrics_file.Tail(path)
    assert list(tail.new_lines()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(tail.new_lines()) == [{"step": 1}]
    with open(path, "a") as f:
        f.write('ep": 2}\n')
    assert list(tail.new_lines()) == [{"step": 2}]


def test_plots_are_drawn_for_what_there_is_data_for(tmp_path):
    write(tmp_path, LINES)
    names = [path.name for path in plots.draw(tmp_path)]
    assert names == ["reward.png", "accuracy.png", "loss.png", "staleness.png", "step_time.png", "overview.png"]
    for name in names:
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_without_metrics_nothing_is_drawn(tmp_path):
    assert plots.draw(tmp_path) == []
    assert not (tmp_path / "plots").exists()


def test_without_a_terminal_each_step_and_evaluation_is_one_plain_line(tmp_path):
    out = io.StringIO()
    with Display(Console(file=out, width=40), tmp_path) as display:
        display.stage("rl", "metrics.jsonl", 4)
        write(tmp_path, LINES)
        display.end_stage()
    shown = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert shown[0] == "eval after step 0: a/exact_match 0.25, b/exact_match 0.75"
    assert shown[1].startswith("rl step 1/4 reward 0.1, accuracy 0.500, loss 0.5, 25 tok/s, eta ")
    assert shown[2].startswith("rl step 2/4 reward 0.3, accuracy 0.500, loss 0.25, 50 tok/s, eta 0:00:")
    assert len(shown) == 4
