"""Starts a function on several torch.distributed ranks, as torchrun would, and collects what each returns.

`run_ranks("tests/models/parallel_cases.py:main", 2, ["arg"])` starts two Python processes that import the file, call `main(["arg"])`
and report its JSON-able result. The function joins the ranks itself (platform.initialize reads RANK and the rest). A launch costs
seconds, so put many cases into one.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run_ranks(target: str, world_size: int, args: list[str] | None = None, timeout_s: float = 300.0) -> list[Any]:
    """Results of `target` ("path/to/file.py:function") by rank. A rank that fails ends the others; its output is in the AssertionError."""
    path, function = target.rsplit(":", 1)
    target = f"{Path(path).resolve()}:{function}"
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        processes = []
        for rank in range(world_size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
            }
            command = [sys.executable, __file__, target, f"{folder}/{rank}.json", *(args or [])]
            with open(f"{folder}/{rank}.log", "w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        try:
            failed = _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if failed is not None:
            output = Path(f"{folder}/{failed}.log").read_text()[-6000:]
            raise AssertionError(f"rank {failed} of {world_size}: exit code {processes[failed].returncode}\n{output}")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen], deadline: float) -> int | None:
    """The first rank that failed (or, at the deadline, that still runs), None when all succeeded."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if None not in codes:
            return None
        time.sleep(0.05)
    return next((rank for rank, process in enumerate(processes) if process.poll() is None), None)


def _child(target: str, result: str, args: list[str]) -> None:
    path, function = target.rsplit(":", 1)
    sys.path.insert(0, str(Path(__file__).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    Path(result).write_text(json.dumps(getattr(module, function)(args)))


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], sys.argv[3:])
