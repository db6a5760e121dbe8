"""TCP ports on this machine."""

import socket
from collections.abc import Iterator

from megatron_rl.config.base import ConfigError
from megatron_rl.config.inference import InferenceConfig
from megatron_rl.inference.server import check_port


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now, all different."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def engine_ports(inference: InferenceConfig) -> list[int]:
    """The port of each engine: counting up from inference.port, or free ones."""
    if inference.port:
        return [inference.port + i for i in range(inference.engines)]
    return free_ports(inference.engines, inference.host)


def problems(inference: InferenceConfig) -> Iterator[str]:
    """Ports that were asked for and are taken."""
    for i in range(inference.engines if inference.port else 0):
        port = inference.port + i
        if port > 65535:
            yield f"inference.port = {inference.port}: {inference.engines} engines counting up from it pass port 65535; use a lower one"
            return
        try:
            check_port(inference.host, port)
        except ConfigError as error:
            yield f"{error} (engine {i})"
