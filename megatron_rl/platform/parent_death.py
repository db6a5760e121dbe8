"""Children that do not outlive who started them."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(sig: int = signal.SIGKILL) -> Callable[[], None]:
    """For `Popen(preexec_fn=...)`: the kernel sends `sig` to the child when the thread that starts it ends."""
    parent = os.getpid()

    def set_death_signal() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, sig)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    return set_death_signal
