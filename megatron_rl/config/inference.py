"""The engines: stock vLLM servers."""

from typing import Any

from pydantic import Field

from megatron_rl.config.base import Table


class InferenceConfig(Table):
    """[inference]"""

    engines: int = Field(default=1, ge=1)
    """vLLM servers that the launcher starts on this machine."""
    host: str = "127.0.0.1"
    """Servers listen on loopback unless told otherwise."""
    port: int = Field(default=0, ge=0, le=65535)
    """Of the first engine, counting up; 0: free ports are chosen."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Workers that share the weights of one engine."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Sequences that one engine decodes at a time."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """KV cache of one engine. Absent: 1 GiB on CPU; on GPUs vLLM sizes it by gpu_memory_utilization."""
    enforce_eager: bool = True
    """False compiles the model: slower start, faster decoding."""
    threads: int | None = Field(default=None, ge=1)
    """CPU cores of one engine; default: all."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """An engine that takes longer to answer ends the run."""
    vllm: dict[str, Any] = {}
    """Further `vllm serve` arguments, by their long name without dashes in front: {"swap-space" = 0}."""
