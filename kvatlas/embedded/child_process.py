"""Processes that end with the one that started them, however that ends."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO

from kvatlas.embedded import die_with_parent as shim


def child_command(command: Sequence[str]) -> list[str]:
    """What to execute instead of `command`, so that it is killed when the *thread* that starts it ends (Linux).

    Right for a thread that lives as long as the process, such as the main one; else use `spawn_child`.
    """
    return [sys.executable, "-I", "-S", shim.__file__, str(os.getpid()), *command]


def spawn_child(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own; it is killed when this process ends, also by SIGKILL (Linux).

    The session means that Ctrl-C in a terminal is for this process, which stops the other in order. Options are those of
    subprocess.Popen. Any thread may call it.
    """
    return (
        _spawner(os.getpid())
        .submit(
            subprocess.Popen,
            child_command(command),
            cwd=cwd,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        .result()
    )


@cache
def _spawner(process_id: int) -> ThreadPoolExecutor:
    """The thread that starts every process owned by this one.

    The kernel's parent-death signal is sent when the *thread* that forked ends, so that must be one that lives as long as
    the process. Keyed by process id, because after a fork the child has no such thread.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"owned-processes-{process_id}")
