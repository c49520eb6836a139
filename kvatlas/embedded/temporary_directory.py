"""Temporary directories that don't pile up when their processes are killed."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "kvatlas-"
_LOCK = "owner.lock"


class OwnedDirectory:
    """A directory inside the system's temporary one, locked by this process for as long as it lives.

    The kernel drops the lock when the process ends, even by SIGKILL. The next process that creates such a directory then
    removes those without an owner.
    """

    def __init__(self) -> None:
        _remove_ownerless()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Lock it before it has the name that other processes look for, so that none of them can lock it first.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_ownerless() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # it belongs to another user, or was removed in the meantime
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(descriptor)
