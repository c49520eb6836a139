"""Replaces this process with a program that the kernel kills when its parent dies.

Run this as a file, in an interpreter with nothing loaded: `python -I -S die_with_parent.py PARENT_PID COMMAND...`. A
`preexec_fn` would instead run Python code between fork and exec of a process with threads, which can deadlock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec


def execute(parent_pid: int, command: list[str]) -> None:
    """Replace this process with `command`. Exits with 1 if the parent is already gone."""
    if sys.platform == "linux":
        # SIGKILL, because a paused program never acts on SIGTERM; both servers recover from being killed.
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent_pid:  # the parent died before the call above
            sys.exit("the parent process has ended")
    try:
        os.execvp(command[0], command)  # noqa: S606 - the caller chooses the command
    except OSError as error:
        sys.exit(f"{command[0]} can't be executed: {error.strerror}")


if __name__ == "__main__":
    execute(int(sys.argv[1]), sys.argv[2:])
