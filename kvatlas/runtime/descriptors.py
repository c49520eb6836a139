"""File descriptors of this process: each connection takes one, and a process without any left accepts and opens none."""

import os
import resource
from dataclasses import dataclass

FEW = 1024
"""A router needs two for each request, and one for each connection that it keeps."""
RESERVED = 256
"""For everything but requests: the store, NATS, probes, operators, files."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """`open` now, of at most `most`."""

    open: int
    most: int


def count_descriptors() -> Descriptors:
    """Those of this process. Without /proc none is counted."""
    try:
        count = len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    except OSError:  # also if none is left to list them with
        count = _probe_free()
    return Descriptors(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_limit() -> Descriptors:
    """Allow as many as this process may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return count_descriptors()


def most_requests() -> int:
    """Requests that this process can forward at a time: each needs a connection of its client and one to an engine."""
    most = count_descriptors().most
    return max(1, (most - min(RESERVED, most // 4)) // 2)


def _probe_free() -> int:
    """All are in use, or /proc is not there."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if os.path.isdir("/proc/self/fd") else 0
