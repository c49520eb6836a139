"""The file descriptors of this process. Each connection takes one; a process that has none left can't accept or open
connections."""

import os
import resource
from dataclasses import dataclass

FEW = 1024
"""A limit below this is low, because a router needs two for each request, and one for each connection that it keeps open."""
RESERVED = 256
"""Reserved for everything except requests: the store, NATS, probes, operators, files."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """`open`: how many descriptors are in use now; `most`: the limit."""

    open: int
    most: int


def count_descriptors() -> Descriptors:
    """The descriptors of this process. If there is no /proc, `open` is 0."""
    try:
        count = len(os.listdir("/proc/self/fd")) - 1  # not counting the one that this listing uses
    except OSError:  # even if none is left for listing them
        count = _probe_free()
    return Descriptors(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_limit() -> Descriptors:
    """Raise the limit as far as this process is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return count_descriptors()


def most_requests() -> int:
    """How many requests this process can forward at the same time: each needs one connection from its client and one to an
    engine."""
    most = count_descriptors().most
    return max(1, (most - min(RESERVED, most // 4)) // 2)


def _probe_free() -> int:
    """The count to use when listing fails: the limit if all descriptors are in use, or 0 if there is no /proc."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if os.path.isdir("/proc/self/fd") else 0
