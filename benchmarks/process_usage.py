"""CPU time and memory of a process, from Linux's /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time of all its threads since its start, and its resident memory."""

    cpu_s: float
    rss_bytes: int


def usage_of(pid: int) -> Usage:
    """The usage of a process. Raises ProcessLookupError if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} has ended") from error
    user, system = stat.rpartition(")")[2].split()[11:13]  # fields 14 and 15; the name before them may hold spaces
    (rss_kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    return Usage((int(user) + int(system)) / _TICKS_A_SECOND, int(rss_kib) * 1_024)
