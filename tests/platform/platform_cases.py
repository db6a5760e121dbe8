"""What runs on the ranks of tests/platform."""

import warnings

import torch

from megatron_rl import platform
from megatron_rl.config.trainer import ParallelConfig, TrainerConfig


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


def two_ranks(args):
    """What two pipeline stages gather of each other, and `masters`."""
    platform.install()
    parallel = ParallelConfig(pipeline_parallel=2)
    world = platform.initialize(parallel, seed=0, timeout_s=60, threads=1)
    gathered = [platform.gather_json(value, 2) for value in (None, (world.rank, 5000 * world.rank * "\u00e9"))]
    report = masters(args[0], parallel)
    world.shutdown()
    return report | {"gathered": gathered}


def masters(hf_dir, parallel):
    """Per tensor of this stage's optimizer checkpoint: is the saved FP32 master the weight it belongs to, with and without the fix?"""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_rl import conversion, models

    policy = models.build(hf_dir, TrainerConfig(parallel=parallel), "float32")
    conversion.load_hf(policy, hf_dir)
    ddp = DistributedDataParallel(policy.config, DistributedDataParallelConfig(use_distributed_optimizer=True), policy.chunks[0])
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [ddp])
    ddp.zero_grad_buffer()
    optimizer.step()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    model_state = policy.chunks[0].sharded_state_dict()
    weights = {tensor.key: tensor.data for tensor in model_state.values() if hasattr(tensor, "key")}

    def compare():
        state = optimizer.sharded_state_dict(model_state, metadata=metadata)["param_state"]
        saved = {entry["param"].key.removeprefix("optimizer.state.param."): entry["param"].data for entry in state.values()}
        return {name: torch.equal(tensor, weights[name]) for name, tensor in saved.items()}

    stock = compare()
    with platform.unpadded_offsets(optimizer):
        fixed = compare()
    return {"stock": stock, "fixed": fixed, "restored": compare() == stock}
