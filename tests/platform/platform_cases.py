"""What runs on the rank of tests/platform."""

import warnings

import torch

from megatron_rl import platform


def shim(_):
    """The CPU platform as Megatron sees it, after importing Megatron with warnings as errors."""
    platform.install()
    zeros = torch.zeros
    platform.install()
    warnings.simplefilter("error", UserWarning)
    platform.devices.install()
    for message in platform.cpu._EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    import megatron.core.models.hybrid.hybrid_model
    import megatron.core.optimizer  # noqa: F401

    with torch.device("meta"):
        meta = torch.arange(3)
    torch.cuda.manual_seed(5)
    drawn = torch.rand(2)
    state = torch.cuda.get_rng_state()
    after = torch.rand(2)
    torch.cuda.set_rng_state(state)
    return {
        "installed_once": torch.zeros is zeros,
        "current_device": str(torch.cuda.current_device()),
        "factory": str(torch.zeros(2, device="cuda").device),
        "pinned": str(torch.tensor([1], device="cuda", pin_memory=True).device),
        "meta": str(meta.device),
        "type": torch.zeros(1).type(),
        "converted": str(torch.zeros(1).type(torch.float64).dtype),
        "seed_is_cpu_seed": torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(5))),
        "state_restored": torch.equal(after, torch.rand(2)),
    }
