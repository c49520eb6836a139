"""Becomes the program it is told to start, which dies with the process that asked for it.

Run as a file, in an interpreter with nothing loaded: `python -I -S shim.py PARENT_PID COMMAND...`. It exists because the
same call in `preexec_fn` would run Python code between fork and exec of a process with threads, which can deadlock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept over exec


def become(parent_pid: int, command: list[str]) -> None:
    """Replace this process by `command`; exits with 1 if the parent is already gone."""
    if sys.platform == "linux":
        # SIGKILL, because a paused program would never act on SIGTERM; both servers recover from it.
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent_pid:  # it died before the call above
            sys.exit("the process that wanted this one has ended")
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command is the caller's own
    except OSError as error:
        sys.exit(f"{command[0]} can't be executed: {error.strerror}")


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
