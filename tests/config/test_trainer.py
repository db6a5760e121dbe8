"""Contradictions inside [trainer] are refused with the remedy."""

import pytest
from pydantic import ValidationError

from megatron_rl.config.trainer import TrainerConfig

TRAINED = {"train_router": True, "aux_loss_coefficient": 0.1}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"recompute": "selective"}, "recompute = 'selective' needs recompute_modules, some of core_attn, mlp, moe, shared_experts"),
        ({"recompute_modules": ["mlp"]}, "recompute_modules says nothing with recompute = 'none'; set recompute = 'selective'"),
        ({"recompute": "full", "recompute_modules": ["mlp"]}, "recompute_modules says nothing with recompute = 'full'"),
        ({"recompute": "selective", "recompute_modules": ["moe", "shared_experts"]}, "'moe' recomputes the shared experts too"),
        ({"recompute": "selective", "recompute_modules": ["moe"], "moe": TRAINED}, "'moe' with moe.aux_loss_coefficient is not supported"),
        ({"optim": {"betas": [0.9, 1.0]}}, "betas = [0.9, 1.0]: each must be at least 0 and less than 1"),
        ({"moe": {"aux_loss_coefficient": 0.1}}, "aux_loss_coefficient = 0.1 trains routers that are frozen; set train_router = true"),
    ],
)
def test_contradictions_are_refused(given, problem):
    with pytest.raises(ValidationError) as error:
        TrainerConfig.model_validate(given)
    assert problem in str(error.value)


def test_what_goes_together_is_taken():
    config = TrainerConfig.model_validate({"recompute": "selective", "recompute_modules": ["core_attn", "mlp"], "moe": TRAINED})
    assert config.recompute_modules == ("core_attn", "mlp")
