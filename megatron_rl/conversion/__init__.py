"""Weights between HF safetensors and live Megatron models, through the family's table."""

from megatron_rl.conversion.live import export_tensors, load_hf, save_hf

__all__ = ["export_tensors", "load_hf", "save_hf"]
