"""Endpoints as gateways name them (ip:port): of workers, and of the pods of a pool."""

import asyncio
import logging
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from kvatlas.addresses import host_and_port, parse_ip
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import FleetRecord
from kvatlas.runtime.background_task import BackgroundTask
from router_client.upstream.engine_addresses import AddressPolicy

LOOKUP_S = 5.0
"""How often the names of pods are looked up again."""

_log = logging.getLogger("router_client.gateway")


def endpoint_of(url: str, policy: AddressPolicy) -> str:
    """The ip:port of an engine's URL, an IPv6 address in brackets.

    Raises InvalidValue for a URL that has none, because a gateway can't be told a name or to speak TLS, and for an address
    where no engine may be.
    """
    try:
        host, port = host_and_port(url)
    except InvalidValue:
        host, port = "", 0
    ip = parse_ip(host)
    if ip is None or not url.startswith("http:"):
        raise InvalidValue(
            f"{url or '(no address)'}; gateways send requests to http://IP:PORT only, set --advertise-url"
        )
    if not policy.allows(host, port, ip):
        raise InvalidValue(f"{url}; this is no address to send requests to (--engine-addresses)")
    return join_endpoint(str(ip), port)


def join_endpoint(host: str, port: int) -> str:
    """The address of a host, without brackets, and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(endpoint: str) -> str:
    """The host of ip:port, or of an ip alone."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    return endpoint if endpoint.count(":") > 1 else endpoint.partition(":")[0]


class Candidates(NamedTuple):
    """Who may get a request. `workers`: by id; None: all that have an address. `unpublished`: endpoints of pods that
    nobody publishes for."""

    workers: frozenset[str] | None
    unpublished: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """The endpoints of a fleet's workers; the ranks of a data-parallel engine share one.

    `unusable`: why a worker has none, by id.
    """

    endpoints: Mapping[str, str]
    unusable: Mapping[str, str]
    _by_endpoint: Mapping[str, Sequence[str]] = field(repr=False)
    _by_host: Mapping[str, Sequence[str]] = field(repr=False)

    @classmethod
    def of(cls, records: Mapping[str, FleetRecord], policy: AddressPolicy) -> Self:
        """`policy`: where engines may be."""
        endpoints: dict[str, str] = {}
        unusable: dict[str, str] = {}
        by_endpoint: dict[str, list[str]] = {}
        by_host: dict[str, list[str]] = {}
        for worker_id, record in records.items():
            try:
                endpoint = endpoint_of(record.endpoint.url, policy)
            except InvalidValue as error:
                unusable[worker_id] = str(error)
                continue
            endpoints[worker_id] = endpoint
            by_endpoint.setdefault(endpoint, []).append(worker_id)
            by_host.setdefault(host_of(endpoint), []).append(worker_id)
        return cls(endpoints, unusable, by_endpoint, by_host)

    def among(self, members: Collection[str] | None) -> Candidates:
        """The workers at these endpoints, and the endpoints that are nobody's; None: all workers. An ip alone stands for
        all of its ports, and is nobody's endpoint."""
        if members is None:
            return Candidates(frozenset(self.endpoints) if self.unusable else None)
        workers: list[str] = []
        unpublished: list[str] = []
        for member in dict.fromkeys(members):
            has_port = member != host_of(member)
            found = self._by_endpoint.get(member) if has_port else self._by_host.get(member)
            if found is not None:
                workers += found
            elif has_port:
                unpublished.append(member)
        return Candidates(frozenset(workers), unpublished)

    def worker_at(self, endpoint: str) -> str | None:
        """The worker at an endpoint; None if there is none, or several."""
        found = self._by_endpoint.get(endpoint, ())
        return found[0] if len(found) == 1 else None


class PodList:
    """The endpoints of a pool's pods, from `host:port` entries. A name stands for all of its addresses, as that of a headless
    Service does, and is looked up again every LOOKUP_S; if that fails its last addresses stay."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises InvalidValue for an entry that is no host:port."""
        self._entries = [_split_entry(entry) for entry in entries]
        self._found: dict[str, Sequence[str]] = {}
        self._task = BackgroundTask(self._run, "kvatlas gateway pods")

    @property
    def endpoints(self) -> Collection[str] | None:
        """None: no pods are listed, or none was found yet."""
        found = [endpoint for endpoints in self._found.values() for endpoint in endpoints]
        return found or None

    async def start(self) -> None:
        """Look every name up once, then again and again."""
        await self._look_up()
        if self._entries:
            self._task.start()

    async def stop(self) -> None:
        await self._task.stop()

    async def _run(self) -> None:
        while self._task.running:
            await asyncio.sleep(LOOKUP_S)
            await self._look_up()

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        for host, port in self._entries:
            name = f"{host}:{port}"
            try:
                infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as error:
                kept = len(self._found.get(name, ()))
                _log.warning("pods at %s: %s; using the %d known last", name, error.strerror or error, kept)
                continue
            self._found[name] = sorted({join_endpoint(str(info[4][0]), port) for info in infos})


def _split_entry(entry: str) -> tuple[str, int]:
    host, _, port = entry.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise InvalidValue(f"pods has {entry!r:.80}; expected HOST:PORT")
    return host.strip("[]"), int(port)
