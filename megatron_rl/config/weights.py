"""How new weights reach the engines."""

from typing import Literal

from pydantic import Field

from megatron_rl.config.base import Table


class WeightsConfig(Table):
    """[weights]"""

    transport: Literal["filesystem"] = "filesystem"
    verify: bool = True
    """Engines compare a checksum of each tensor with the manifest before any of it is used."""
    stage_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of each stage of an update; passing it names the engine and the stage."""
    keep_last: int = Field(default=2, ge=1)
    """Versions kept in weights/, once every engine holds a newer one."""
