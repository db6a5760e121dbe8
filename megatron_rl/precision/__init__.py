"""8-bit and 4-bit training: which recipe runs where, what Megatron is told, and what is never quantised. No torch import."""

from megatron_rl.precision.ignore import IGNORED, is_ignored
from megatron_rl.precision.recipes import check, megatron_fields, token_alignment

__all__ = ["IGNORED", "check", "is_ignored", "megatron_fields", "token_alignment"]
