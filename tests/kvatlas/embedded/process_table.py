"""Processes as the kernel reports them (Linux)."""

import os
from pathlib import Path

_LISTENING = "0A"  # include/net/tcp_states.h
_LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # as /proc/net prints them on a little-endian machine


def is_alive(pid: int) -> bool:
    """True if the process exists and has not ended; a zombie has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """The process ids of all children, their children, and so on."""
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


def listening_ports(pid: int) -> dict[int, bool]:
    """The process's listening TCP ports; True if a port is reachable over loopback only."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # closed meanwhile, so not a listening socket
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
