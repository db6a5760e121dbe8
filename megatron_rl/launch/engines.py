"""The vLLM engines of a run, from their start until they answer."""

import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path

from megatron_rl.config.run import EvalRunConfig, RLConfig
from megatron_rl.launch import summary
from megatron_rl.launch.commands import subcommand
from megatron_rl.launch.display import Display
from megatron_rl.launch.plan import engine_gpus
from megatron_rl.launch.ports import engine_ports
from megatron_rl.launch.processes import Child, RunFailed, Supervisor
from megatron_rl.platform.stack import gpu_count


class Engines:
    """Starts all engines; `tick` notices what became of them."""

    def __init__(
        self, config: RLConfig | EvalRunConfig, resolved: Path, supervisor: Supervisor, display: Display, clock: summary.Clock
    ) -> None:
        self.config, self.resolved, self.supervisor, self.display, self.clock = config, resolved, supervisor, display, clock
        self.started = time.monotonic()
        self.urls: list[str] = []
        self.children: list[Child] = []
        gpus = engine_gpus(config, gpu_count())
        kind = "rl" if isinstance(config, RLConfig) else "eval"
        for i, port in enumerate(engine_ports(config.inference)):
            line = subcommand("inference", resolved, "--kind", kind, "--engine-index", str(i), "--port", str(port))
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus[i]))} if gpus[i] else {}
            self.children.append(supervisor.start(f"engine_{i}", line, devices))
            self.urls.append(url(config.inference.host, port))
            display.say(f"engine_{i} starts on {self.urls[i]}")
        self.starting = list(range(len(self.urls)))

    def tick(self) -> None:
        """Report engines that have become ready. RunFailed: one takes too long."""
        for i in list(self.starting):
            if answers(f"{self.urls[i]}/health"):
                self.starting.remove(i)
                self.display.say(f"engine_{i} is ready")
                self.clock.add("engine_start", self.started)
        limit = self.config.inference.start_timeout_s
        if self.starting and time.monotonic() - self.started > limit:
            late = self.children[self.starting[0]]
            raise RunFailed(
                f"{late.name} (pid {late.process.pid}) was not ready after inference.start_timeout_s = {limit:g}; log: {late.log}"
            )


def url(host: str, port: int) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def answers(address: str) -> bool:
    """Whether an HTTP server says 200 there."""
    try:
        with urllib.request.urlopen(address, timeout=0.5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False
