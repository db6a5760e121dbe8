"""Outlives the launcher by a moment: when its standard input closes, however the launcher ended, it ends the run's processes.

Started as `python -m megatron_rl.launch.watchdog RUN`; the launcher writes one line per session it starts.
"""

import signal
import sys

from megatron_rl.launch.process_groups import RunProcesses

GRACE_S = 5.0


def main(run: str) -> None:
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)  # only the launcher's end ends it
    left = RunProcesses(run)
    for line in sys.stdin:
        if line.strip():  # an empty line only asks whether we live
            left.sessions.add(int(line))
    if left.living():
        left.end(GRACE_S)


if __name__ == "__main__":
    main(sys.argv[1])
