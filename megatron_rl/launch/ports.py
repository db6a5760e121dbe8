"""TCP ports on this machine."""

import socket
from collections.abc import Iterator

from megatron_rl.config.inference import InferenceConfig


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.socket(_family(host), socket.SOCK_STREAM) for _ in range(count)]
    try:
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def in_use(host: str, port: int) -> bool:
    """Whether a server can't listen there."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return True
    return False


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
        if in_use(inference.host, port):
            yield f"inference.port = {inference.port}: {inference.host}:{port} (engine {i}) is in use; give another, or 0 for free ones"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
