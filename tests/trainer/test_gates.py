"""What must hold before the weights are touched."""

import numpy as np
import pytest

from megatron_rl.trainer.loss import require_finite
from megatron_rl.trainer.step import check_denominators
from megatron_rl.transports.batches.packing import pack
from megatron_rl.transports.batches.records import StepBatch, TrainingSample


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_norm_names_step_and_remedy(value):
    with pytest.raises(FloatingPointError, match=r"step 7: gradient norm is .*not updated.*optim\.lr"):
        require_finite(value, "gradient norm", 7)


def test_a_lost_or_doubled_micro_batch_is_found_by_its_weights():
    """Two documents with 2 and 3 sampled tokens: 5 in all. A rank that lost the first counts 3."""
    samples = [TrainingSample(str(n), str(n), {"token_ids": np.arange(n + 1), "loss_mask": np.arange(n + 1) > 0}) for n in (2, 3)]
    batch = StepBatch(7, 6, pack(samples, 7, 6, capacity=4, data_parallel=1))
    check_denominators({"rl_weight": 5.0, "ce_weight": 0.0}, batch)
    for counted in (3.0, 7.0):
        with pytest.raises(RuntimeError, match=rf"step 7: the ranks hold rl weights of {counted:.6f} in sum, the batch declares 5.000000"):
            check_denominators({"rl_weight": counted, "ce_weight": 0.0}, batch)
    with pytest.raises(RuntimeError, match=r"ce weights of 1\.000000"):
        check_denominators({"rl_weight": 5.0, "ce_weight": 1.0}, batch)
