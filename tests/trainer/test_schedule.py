"""Learning-rate schedules against values worked out by hand."""

import pytest

from megatron_rl.config.trainer import SchedulerConfig
from megatron_rl.trainer.schedule import learning_rate


@pytest.mark.parametrize(
    ("kind", "min_ratio", "expected"),
    [
        # 2 warm-up steps of 6: 0.5, 1.0; then 4 steps of progress 1/4, 1/2, 3/4, 1
        ("constant", 0.0, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", 0.2, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        # cosine: (1 + cos(pi p)) / 2 at p = 1/4, 1/2, 3/4, 1
        ("cosine", 0.0, [0.5, 1.0, 0.8535533905932737, 0.5, 0.14644660940672624, 0.0]),
    ],
)
def test_schedule_warms_up_then_follows_its_shape(kind, min_ratio, expected):
    scheduler = SchedulerConfig(kind=kind, warmup_steps=2, min_ratio=min_ratio)
    assert [learning_rate(step, 1.0, scheduler, 6) for step in range(1, 7)] == pytest.approx(expected, abs=1e-12)


def test_without_warmup_the_first_step_has_the_peak_rate():
    assert learning_rate(1, 3e-4, SchedulerConfig(), 10) == 3e-4
