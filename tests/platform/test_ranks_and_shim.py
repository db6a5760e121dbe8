"""The number of ranks against the layout, and the CPU platform. (Where each rank stands: tests/models/test_parallel_parity.py.)"""

from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.platform import initialize

CASES = f"{Path(__file__).parent}/platform_cases.py"


@pytest.mark.ranks
def test_cpu_answers_for_cuda():
    (seen,) = run_ranks(f"{CASES}:shim", 1)
    assert seen == {
        "installed_once": True,
        "current_device": "cpu",
        "factory": "cpu",
        "pinned": "cpu",
        "meta": "meta",
        "type": "torch.cuda.FloatTensor",
        "converted": "torch.float64",
        "seed_is_cpu_seed": True,
        "state_restored": True,
    }


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        ("3", {"tensor_parallel": 2}, "3 ranks do not divide into replicas of 2"),
        ("2", {"tensor_parallel": 2, "pipeline_parallel": 2}, "2 ranks do not divide into replicas of 4"),
        ("4", {"tensor_parallel": 2, "data_parallel": 3}, "data_parallel = 3, but 4 ranks make 2 replicas of 2"),
    ],
)
def test_wrong_number_of_ranks_is_one_line_before_any_communication(monkeypatch, ranks, sizes, message):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ConfigError) as caught:
        initialize(ParallelConfig(**sizes), seed=0, timeout_s=1)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not dist.is_initialized()
