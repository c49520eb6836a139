"""Free loopback ports for servers that need their port number before they start."""

import errno
import os
import random
import socket

LOOPBACK = "127.0.0.1"
CLUSTER_BUS_OFFSET = 10_000

# Below the range from which Linux takes the ports of outgoing connections (32768 and up): otherwise a client's connection
# could occupy a server's port while the server restarts. A cluster's bus port, 10,000 higher, stays below it too.
_LOWEST, _HIGHEST = 12_000, 22_000

# Not the seeded global generator: processes that set the same seed would all try the same ports in the same order.
_random = random.SystemRandom()


def is_free(port: int) -> bool:
    """True if a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no hindrance
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        return True


def free_port(*, with_bus: bool = False) -> int:
    """A port that is free now (`with_bus`: its cluster bus port too). Another process may still take it first."""
    for _ in range(1_000):
        port = _random.randrange(_LOWEST, _HIGHEST)
        if is_free(port) and not (with_bus and not is_free(port + CLUSTER_BUS_OFFSET)):
            return port
    raise OSError(errno.EADDRINUSE, f"{os.strerror(errno.EADDRINUSE)}: no free port from {_LOWEST} to {_HIGHEST}")
