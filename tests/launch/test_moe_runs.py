"""Mixture-of-experts models train against their own engine: trainer and vLLM give every sampled token the same probability."""

import pytest
from whole_runs import Launch, prepare

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.timeout(900)]
EXACT = ("--deterministic", "true", "--orchestrator.lag", "0", "--trainer.optim.lr", "1e-3")


@pytest.mark.parametrize(
    ("family", "layout"),
    [("Qwen3Moe", ("--trainer.parallel.expert-parallel", "2")), ("Glm4Moe", ())],
    ids=["qwen3_moe-ep2", "glm4_moe"],
)
def test_trainer_and_engine_agree_on_every_token(tmp_path, family, layout):
    prepare(tmp_path, family)
    launch = Launch(tmp_path, *EXACT, *layout)
    assert launch.wait() == 0, launch.console
    steps = [line for line in launch.lines() if "loss/total" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["tokens/trained"] > 0 for line in steps)
    # Step 1 samples from the warmed-up weights, step 2 from those that RL changed: both went through a weight update.
    assert max(line["logprob_diff/max"] for line in steps) < 1e-4
    assert steps[0]["grad_norm"] > 0
