"""How a process of ours ends: 2 the user's mistake (`error: ...` lines), 1 ours (one line and a traceback), 130 interrupted."""

import sys
import tempfile
import traceback
from collections.abc import Callable

from megatron_rl.config.base import ConfigError
from megatron_rl.launch.processes import RunFailed


def run_process(act: Callable[[], object]) -> int:
    """Run `act` and return the exit code of the process; whatever went wrong has been said on standard error."""
    try:
        act()
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {' '.join(problem.split())}", file=sys.stderr)  # what user code says may have many lines
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted: everything that was started has been ended", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())} ({_keep_traceback()})", file=sys.stderr)
        return 1
    return 0


def _keep_traceback() -> str:
    """Where the traceback of the current exception is: in the log, if standard error is one, else in a file."""
    if not sys.stderr.isatty():
        traceback.print_exc()
        return "traceback above"
    with tempfile.NamedTemporaryFile("w", prefix="megatron-rl-", suffix=".log", delete=False) as log:
        traceback.print_exc(file=log)
    return f"traceback in {log.name}"
