"""Free loopback ports for servers that need their port number before they start."""

import collections
import errno
import fcntl
import functools
import os
import random
import socket
import tempfile
from pathlib import Path

LOOPBACK = "127.0.0.1"

# Below the range from which Linux takes the ports of outgoing connections (32768 and up); otherwise a client's connection could
# occupy a server's port while that server restarts. The bus port of a cluster, 10,000 higher, stays below that range too.
PORTS = range(12_000, 22_000)

# Not the seeded global generator, because processes that set the same seed would all try the same ports in the same order.
_random = random.SystemRandom()

# A port that was given out stays free until its server listens on it, seconds later. In the meantime, a lock keeps other
# processes of this user from taking it. Each lock is one byte of one file; the kernel drops a process's locks when it ends.
LEASES = 256
_leased: collections.deque[int] = collections.deque()


def is_free(port: int) -> bool:
    """True if a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: ignore TIME_WAIT
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        return True


def free_port() -> int:
    """A port that is free now, and that no other caller has been given recently.

    It stays reserved during the next 255 calls of this process. A program that does not ask here may still take it first.
    """
    for _ in range(1_000):
        port = _random.choice(PORTS)
        if is_free(port) and _lease(port):
            return port
    raise OSError(
        errno.EADDRINUSE, f"{os.strerror(errno.EADDRINUSE)}: no free port of {PORTS.start} to {PORTS.stop - 1}"
    )


def _lease(port: int) -> bool:
    if port in _leased:
        return False
    locks = _locks()
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another process holds
        return False
    _leased.append(port)
    if len(_leased) > LEASES:
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, _leased.popleft())
    return True


@functools.cache
def _locks() -> int:
    path = Path(tempfile.gettempdir()) / f"kvatlas-ports-{os.getuid()}.lock"
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
