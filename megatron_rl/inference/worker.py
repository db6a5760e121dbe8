"""The half of a weight update that runs inside vLLM's workers (`--worker-extension-cls megatron_rl.inference.worker.WeightsExtension`).

Importing this module registers the weight-transfer backend "filesystem". The driver calls the extension's methods through /collective_rpc.
They return their failures: vLLM 0.32.0's executor stops collecting answers at the first worker that raises, and would take the other
workers' leftover answers for those of the next call.
"""

import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_rl.inference.engine_compat import reload_weights, silence_layerwise_reload
from megatron_rl.inference.guard import WATCHER_VARIABLE
from megatron_rl.transports.weights.base import WeightTransferError
from megatron_rl.transports.weights.manifest import Manifest
from megatron_rl.transports.weights.verify import check_layout, read_version

BACKEND = "filesystem"
STAGE_WAIT_S = 0.05
"""How long a stage call holds up decoding for a copy that is about to be complete."""


@dataclass
class FilesystemInit(WeightTransferInitInfo):
    """Nothing to negotiate."""


@dataclass
class FilesystemUpdate(WeightTransferUpdateInfo):
    """The version to put in place; it must be staged."""

    version: int


@dataclass
class Shadow:
    """A verified copy in the making, on the host, beside the weights that serve."""

    directory: str
    manifest: Manifest
    tensors: Future[dict[str, torch.Tensor]]


class FilesystemWeights(WeightTransferEngine[FilesystemInit, FilesystemUpdate]):
    """Holds one version at a time, and a shadow copy of the next while it is staged."""

    init_info_cls = FilesystemInit
    update_info_cls = FilesystemUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: Manifest | None = None
        """What the weights are; None before the first version, and from the first byte of a flip to its end."""
        self.layout: Manifest | None = None
        """The last version held: the names, shapes and dtypes that every later one must have."""
        self.shadow: Shadow | None = None
        self.loading: str | None = None
        """The tensor that a flip is at."""
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage-weights")

    def stage(self, version: int, directory: str, verify: bool) -> bool:
        """Begin or go on to copy and verify a version; True once it may be flipped to (or is held already).

        Decoding goes on meanwhile, in the caller's pauses between calls. Raises what went wrong with the copy.
        """
        shadow = self.shadow
        if shadow is None or (shadow.directory, shadow.manifest.version) != (directory, version) or shadow.tensors.done():
            manifest = Manifest.read(Path(directory))
            if manifest.version != version:
                raise WeightTransferError(f"{directory} holds version {manifest.version}, not {version}")
            if manifest == self.held:
                self.drop()
                return True
            if self.layout is not None:
                check_layout(manifest, self.layout)
            if shadow is None or shadow.manifest != manifest or not shadow.tensors.done() or shadow.tensors.exception() is not None:
                shadow = Shadow(directory, manifest, self._reader.submit(read_version, Path(directory), manifest, verify))
                self.shadow = shadow
        wait_for([shadow.tensors], timeout=STAGE_WAIT_S)
        return shadow.tensors.done() and shadow.tensors.result() is not None

    def drop(self) -> None:
        """Forget the shadow copy."""
        self.shadow = None

    def init_transfer_engine(self, init_info: FilesystemInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: FilesystemUpdate) -> None:
        """Put the staged copy in place. Harmless if the version is held; on an error the weights are of no version."""
        if self.shadow is None and self.held is not None and self.held.version == update_info.version:
            return
        if self.shadow is None or self.shadow.manifest.version != update_info.version or not self.shadow.tensors.done():
            raise WeightTransferError(f"version {update_info.version} is not staged")
        tensors, manifest = self.shadow.tensors.result(), self.shadow.manifest
        self.held = None
        reload_weights(self.model, self.model_config, self._named(tensors))
        self.held = self.layout = manifest
        self.shadow = self.loading = None

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _named(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            self.loading = name
            yield name, tensor


class WeightsExtension:
    """Methods of every worker, mixed into vLLM's worker class. A failure is {"state": "failed", "reason": ..., "tensor": ...}."""

    weight_transfer_engine: FilesystemWeights

    def stage_weights(self, version: int, directory: str, verify: bool) -> dict[str, Any]:
        """{"state": "staged"} once the copy is complete and verified, {"state": "staging"} before: call again."""
        try:
            return {"state": "staged" if self.weight_transfer_engine.stage(version, directory, verify) else "staging"}
        except Exception as error:  # the executor's answers must stay in step, see above
            return _failure(error, getattr(error, "tensor", None))

    def flip_weights(self, version: int) -> dict[str, Any]:
        """{"state": "held"}. After a failure the weights are of no version until a flip succeeds."""
        engine = self.weight_transfer_engine
        engine.loading = None
        try:
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights({"version": version})  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]
        except Exception as error:  # the executor's answers must stay in step, see above
            return _failure(error, getattr(error, "tensor", None) or engine.loading)
        return {"state": "held"}

    def drop_staged_weights(self) -> dict[str, Any]:
        """{"state": "dropped"}."""
        self.weight_transfer_engine.drop()
        return {"state": "dropped"}


def _failure(error: Exception, tensor: str | None) -> dict[str, Any]:
    reason = str(error) if isinstance(error, WeightTransferError) else f"{type(error).__name__}: {error}"
    return {"state": "failed", "reason": " ".join(reason.split()), "tensor": tensor}


def die_with(pid: int) -> None:
    """Kill this process once process `pid` has ended. vLLM's engine processes outlive an API server that was killed; an engine without a
    worker gives up by itself, so it is enough that the workers do this.
    """
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    select.select([ended], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


WeightTransferEngineFactory.register_engine(BACKEND, FilesystemWeights)
silence_layerwise_reload()
if watcher := os.environ.get(WATCHER_VARIABLE):
    threading.Thread(target=die_with, args=(int(watcher),), name="die-with-watcher", daemon=True).start()
