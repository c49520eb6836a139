"""What the kernel says about a process (Linux)."""

import os
from pathlib import Path

_LISTENING = "0A"  # include/net/tcp_states.h
_LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # as /proc/net prints them on a little-endian machine


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended; a zombie that nobody has reaped has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """Every process that this one has started, and that those have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    unseen = [pid]
    while unseen:
        for child in children.get(unseen.pop(), []):
            found.add(child)
            unseen.append(child)
    return found


def listens_on(pid: int) -> dict[int, bool]:
    """The process' listening TCP ports; True where it is reached over loopback only."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # it was closed meanwhile: no socket that listens
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == _LISTENING and fields[9] in inodes:
                found[int(port, 16)] = address in _LOOPBACK
    return found
