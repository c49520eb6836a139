"""Starts child processes that die with their parent, however it ends."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO

from kvatlas.embedded import die_with_parent


def child_command(command: Sequence[str]) -> list[str]:
    """The command to execute in place of `command`, so that it is killed when the *thread* that started it ends (Linux).

    Start it in a thread that lives as long as the process, such as the main thread. In any other thread, use `spawn_child`.
    """
    return [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command]


def spawn_child(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session; it is killed when this process ends, even by SIGKILL (Linux).

    Because of the session, Ctrl-C in a terminal reaches only this process, which then stops the child in an orderly way.
    The options are those of subprocess.Popen. Any thread may call it.
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
    """The thread that starts all children of this process.

    The kernel sends the parent-death signal when the *thread* that forked ends, so this thread must live as long as the
    process. The cache is keyed by process id, because a forked process does not have this thread.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"child-processes-{process_id}")
