"""Where processes are placed."""

import pytest

from megatron_rl.config.run import RLConfig
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.launch.plan import coordinates, engine_gpus


def config(ranks, engines, size):
    return RLConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "trainer": {"parallel": {"data_parallel": ranks}},
            "inference": {"engines": engines, "tensor_parallel": size},
            "train": {"source": [{"id": "a", "env": {"name": "reasoning_gym"}}]},
        }
    )


@pytest.mark.parametrize(
    ("ranks", "engines", "size", "gpus", "expected"),
    [
        (2, 1, 2, 4, [[2, 3]]),  # beside the trainer
        (4, 2, 2, 8, [[4, 5], [6, 7]]),
        (1, 1, 1, 1, [[0]]),  # too few: shared
        (2, 2, 2, 4, [[0, 1], [2, 3]]),
        (1, 2, 1, 0, [[], []]),  # cpu
    ],
)
def test_engines_take_the_gpus_after_the_trainers(ranks, engines, size, gpus, expected):
    assert engine_gpus(config(ranks, engines, size), gpus) == expected


def test_ranks_count_tensor_context_data_pipeline():
    parallel = ParallelConfig(tensor_parallel=2, context_parallel=2, data_parallel=2, pipeline_parallel=2)
    # rank 13 = 1 + 2 * 0 + 4 * 1 + 8 * 1
    assert coordinates(13, parallel) == "tensor 1/2, context 0/2, data 1/2, pipeline 1/2"
    assert coordinates(0, ParallelConfig()) == "one rank"
