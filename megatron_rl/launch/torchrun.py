"""`torchrun ... megatron-rl rl` (or sft): every rank becomes a trainer rank; of rl, rank 0 also starts a process that runs all the rest.

That process (`services`) starts the engines and the orchestrator and ends with rank 0, whose pipe it reads; rank 0 ends when it does.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config.run import RLConfig, SftRunConfig
from megatron_rl.launch import preflight, run_dir
from megatron_rl.launch.commands import TOKEN, module, run_environment
from megatron_rl.launch.ports import free_ports
from megatron_rl.platform.parent_death import die_with_parent

SHARE_TIMEOUT_S = 300
"""How long ranks wait for rank 0's word where everything is."""


def main(config: RLConfig | SftRunConfig, command: Sequence[str], console: Console) -> None:
    """This rank, to the end of the run."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    services = None
    if rank == 0:
        preflight.check(config, ranks)
        parallel = config.trainer.parallel
        layout = parallel.model_copy(update={"data_parallel": ranks // parallel.model_parallel})
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"parallel": layout})})
        run = run_dir.open_run(config, config.run, config.resume, command)
        shared = _share(_meeting(run.path, run.resolved, config))
        services = Services(shared) if isinstance(config, RLConfig) and not config.trainer.replay else None
        console.print(f"run directory {run.path}, attempt {run.attempt}; logs in {run.logs}", highlight=False, soft_wrap=True)
    else:
        shared = _share(None)
    os.environ.update(run_environment() | {TOKEN: shared["token"]})
    _write_to(Path(shared["logs"]) / f"trainer_{rank}.log")
    _train(type(config), shared, services)
    if services is not None:
        services.finish()


def _meeting(path: Path, resolved: Path, config: RLConfig | SftRunConfig) -> dict[str, Any]:
    """What every rank must know."""
    host = "127.0.0.1" if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] else os.environ["MASTER_ADDR"]
    batches, port = free_ports(2, "0.0.0.0" if host != "127.0.0.1" else host)
    zmq = isinstance(config, RLConfig) and config.orchestrator.batch_transport == "zmq"
    return {
        "token": secrets.token_hex(16),
        "resolved": str(resolved.resolve()),
        "logs": str((path / "logs" / resolved.parent.name).resolve()),
        "batches": f"tcp://{host}:{batches}" if zmq else str(path.resolve() / "exchange"),
        "port": port,
    }


def _share(mine: dict[str, Any] | None) -> dict[str, Any]:
    """Rank 0's record, on every rank, through the store at which torchrun's ranks meet."""
    from torch.distributed import PrefixStore, TCPStore

    serves = mine is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=serves, timeout=timedelta(seconds=SHARE_TIMEOUT_S), multi_tenant=True, wait_for_workers=False)
    place = PrefixStore(f"megatron_rl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if mine is not None:
        place.set("run", json.dumps(mine))
    return json.loads(place.get("run"))


def _train(kind: type[RLConfig | SftRunConfig], shared: dict[str, Any], services: "Services | None") -> None:
    from megatron_rl.config.load import load
    from megatron_rl.launch import trainer_process

    config = load(kind, ["--config", shared["resolved"]]).config
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # ours, on a port of its own
    os.environ["MASTER_PORT"] = str(shared["port"])
    world = trainer_process.join(config)
    if isinstance(config, SftRunConfig) or config.warms_up:
        trainer_process.warm_up(config, world)
    if services is not None:
        services.tell("rl")
    if isinstance(config, RLConfig):
        trainer_process.train(config, world, shared["batches"])
    world.shutdown()


class Services:
    """Rank 0's side of the process that runs engines and orchestrator: it hears which stage begins, and rank 0 ends if it ends."""

    def __init__(self, shared: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            module("services", shared["resolved"], shared["batches"]),
            env={**os.environ, **run_environment(), TOKEN: shared["token"]},
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """The trainer has ended well: wait until the rest has, too; this process ends here if it ends badly."""
        self.tell("done")
        self._watcher.join()

    def _watch(self) -> None:
        code = self.process.wait()
        if code:  # it has said why; this rank may be anywhere, also inside a collective
            os._exit(code if code > 0 else 1)


def _write_to(log: Path) -> None:
    """From here on, what this process and its libraries print goes to its log; the console is for the progress of the run."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
