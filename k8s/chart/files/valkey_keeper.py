"""Keeps Valkey servers one cluster: valkey_keeper.py --primaries P HOST:PORT...

Each round it asks every server what it sees, and takes the first step that is due: introduces servers that do not see each
other (a pod's address changes with each start), hands out slots that nobody serves, gives a primary without slots to the
primary with the fewest replicas, and has servers forgotten that came back as others. Every other failover is the servers' own
work. Blocks need no move: what a shard forgot, publishers tell again.

VALKEY_CREDENTIALS: scheme, user and password, as in rediss://keeper:secret@ (default redis://).
"""

import argparse
import logging
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError

SLOTS = 16_384
ROUND_S = 5.0
ANSWER_S = 2.0

log = logging.getLogger("keeper")


@dataclass(frozen=True, slots=True)
class Seen:
    """One line of CLUSTER NODES. `primary`: the id of the one that it replicates, or `-`."""

    node_id: str
    flags: frozenset[str]
    primary: str
    linked: bool
    slots: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, line: str) -> "Seen":
        node_id, _, flags, primary, _, _, _, link, *ranges = line.split()
        slots = [one.partition("-")[::2] for one in ranges if not one.startswith("[")]
        return cls(
            node_id,
            frozenset(flags.split(",")),
            primary,
            link == "connected",
            tuple((int(first), int(last or first)) for first, last in slots),
        )


class Server:
    """One server by its name; its address is looked up each time."""

    def __init__(self, name: str, credentials: str) -> None:
        self.name = name
        self.host, _, port = name.rpartition(":")
        self.port = int(port)
        self._client: Any = redis.Redis.from_url(
            f"{credentials}{name}", socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S
        )
        self._client.set_response_callback("CLUSTER NODES", lambda answer, **_: answer.decode())
        self.node_id = ""
        self.seen: dict[str, Seen] = {}

    def look(self) -> None:
        """What it sees now. Raises RedisError."""
        found = [Seen.parse(line) for line in self._client.execute_command("CLUSTER NODES").splitlines()]
        self.seen = {one.node_id: one for one in found}
        self.node_id = next(one.node_id for one in found if "myself" in one.flags)

    @property
    def own(self) -> Seen:
        return self.seen[self.node_id]

    def sees(self, other: "Server") -> bool:
        """Is it in touch with the other one, at its present address?"""
        known = self.seen.get(other.node_id)
        return known is not None and known.linked and not known.flags & {"handshake", "fail", "fail?", "noaddr"}

    def command(self, *words: str | int) -> None:
        """Raises RedisError."""
        log.info("%s: %s", self.name, " ".join(str(word) for word in words))
        self._client.execute_command(*words)


def keep(servers: list[Server], primaries: int) -> str:
    """One round: what is so, or what was done about it. Raises RedisError and OSError for a server that went in between."""
    silent = [server.name for server in servers if not _answers(server)]
    up = [server for server in servers if server.name not in silent]
    if not up:
        return "no server answers"
    strangers = [other for other in up[1:] if not (up[0].sees(other) and other.sees(up[0]))]
    if strangers and not any("handshake" in seen.flags for seen in up[0].seen.values()):
        for other in strangers:
            up[0].command("CLUSTER MEET", socket.gethostbyname(other.host), other.port)
        return f"introduced {_names(strangers)} to {up[0].name}"
    if silent:
        return f"no answer from {', '.join(silent)}"  # its replica takes over, and nothing is handed out meanwhile
    if strangers or any(not one.sees(other) for one in up for other in up if one is not other):
        return "servers are getting to know each other"
    return _bury_the_dead(up) or _serve_all_slots(up, primaries) or _replicate(up) or "all is well"


def _answers(server: Server) -> bool:
    try:
        server.look()
    except (RedisError, OSError) as error:
        log.debug("%s: %s", server.name, error)
        return False
    return True


def _serve_all_slots(servers: list[Server], primaries: int) -> str:
    """Slots that nobody serves, in even ranges to servers without any, or to a primary where there are enough."""
    served = {slot for server in servers for first, last in server.own.slots for slot in range(first, last + 1)}
    if len(served) == SLOTS:
        return ""
    serving = [server for server in servers if server.own.slots]
    idle = [server for server in servers if "master" in server.own.flags and not server.own.slots]
    takers = idle[: primaries - len(serving)] or serving[:1]
    free = [slot for slot in range(SLOTS) if slot not in served]
    for index, taker in enumerate(takers):
        share = free[len(free) * index // len(takers) : len(free) * (index + 1) // len(takers)]
        taker.command("CLUSTER ADDSLOTSRANGE", *(bound for pair in _ranges(share) for bound in pair))
    return f"gave {len(free)} slots to {_names(takers)}"


def _ranges(slots: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot - 1:
            found[-1] = (found[-1][0], slot)
        else:
            found.append((slot, slot))
    return found


def _replicate(servers: list[Server]) -> str:
    """Primaries without slots become replicas, each of the primary that has the fewest."""
    replicas = Counter({server.node_id: 0 for server in servers if server.own.slots})
    replicas.update(server.own.primary for server in servers if server.own.primary in replicas)
    idle = [server for server in servers if "master" in server.own.flags and not server.own.slots]
    for server in idle:
        primary = min(replicas, key=lambda node_id: replicas[node_id])
        server.command("CLUSTER REPLICATE", primary)
        replicas[primary] += 1
    return f"made replicas of {_names(idle)}" if idle else ""


def _bury_the_dead(servers: list[Server]) -> str:
    """Servers that are known and are none of those that answer, though all do: they lost their disk and have new ids now."""
    living = {server.node_id for server in servers}
    known = {one for server in servers for one, seen in server.seen.items() if "handshake" not in seen.flags}
    dead = sorted(known - living)
    for node_id in dead:
        heirs = [server for server in servers if server.own.primary == node_id]
        if heirs:
            heirs[0].command("CLUSTER FAILOVER", "TAKEOVER")
            continue
        for server in servers:
            if node_id in server.seen:
                server.command("CLUSTER FORGET", node_id)
    return f"{len(dead)} servers lost their disk: replicas took over, or they are forgotten" if dead else ""


def _names(servers: list[Server]) -> str:
    return ", ".join(server.name for server in servers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--primaries", type=int, required=True)
    parser.add_argument("servers", nargs="+", metavar="HOST:PORT")
    arguments = parser.parse_args()
    logging.basicConfig(format="keeper: %(message)s", level=logging.INFO)
    credentials = os.environ.get("VALKEY_CREDENTIALS", "redis://")
    servers = [Server(name, credentials) for name in arguments.servers]
    before = ""
    while True:
        try:
            now = keep(servers, arguments.primaries)
        except (RedisError, OSError) as error:
            now = f"interrupted: {error}"
        if now != before:
            log.info("%s", now)
        before = now
        time.sleep(ROUND_S)


if __name__ == "__main__":
    main()
