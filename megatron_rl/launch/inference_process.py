"""`megatron-rl inference`: one engine."""

import sys

from megatron_rl.config.run import EvalRunConfig, RLConfig
from megatron_rl.launch.ports import engine_ports


def main(config: RLConfig | EvalRunConfig, engine_index: int, port: int | None) -> None:
    """Serve until ended; the process ends with the server's exit code."""
    from megatron_rl.inference import server

    sys.exit(server.run(config, engine_index, port or engine_ports(config.inference)[engine_index]))
