"""Sends the worker's heartbeat every second, with its incarnation, its acknowledged seq, and the engine's state and load
(thin)."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import time
from typing import NamedTuple

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.bus.subjects import alive_subject
from kvatlas.fleet.records import Diagnosis, EngineEndpoint, EngineState, Heartbeat, WorkerState
from kvatlas.version import own_version
from kvatlas_publishers.stream.outbox import Outbox

HEARTBEAT_S = 1.0


class DoctorFacts(NamedTuple):
    """Fields of a heartbeat that only `kvatlas doctor` reads (`kvatlas.fleet.records.Heartbeat`)."""

    diagnoses: Sequence[Diagnosis] = ()
    served_names: Sequence[str] = ()
    awaited_s: int | None = None


class HeartbeatSender:
    """Call `run` (until cancelled), and `send` immediately when something changes that routers should know about."""

    def __init__(
        self,
        client: Client,
        endpoint: Callable[[], EngineEndpoint],
        outbox: Outbox,
        *,
        state: Callable[[], EngineState],
        load: Callable[[], WorkerState | None],
        doctor_facts: Callable[[], DoctorFacts] = DoctorFacts,
        quiet: Callable[[], bool] = lambda: False,
        fleet_id: str | None = None,
        every_s: float = HEARTBEAT_S,
    ) -> None:
        """`quiet`: True while another publisher publishes the worker; heartbeats are then only informational. `fleet_id`: the
        configured fleet."""
        self._client = client
        self._endpoint = endpoint
        self._outbox = outbox
        self._state = state
        self._load = load
        self._doctor_facts = doctor_facts
        self._version = own_version()
        self._quiet = quiet
        self._fleet_id = fleet_id
        self._every_s = every_s

    def heartbeat(self, state: EngineState | None = None) -> Heartbeat:
        """The heartbeat to send now. `state`: overrides the engine's state."""
        facts = self._doctor_facts()
        return Heartbeat(
            worker_id=self._outbox.worker_id,
            incarnation=self._outbox.incarnation,
            acked_seq=self._outbox.acked_seq,
            state=state or self._state(),
            endpoint=self._endpoint(),
            load=self._load(),
            sent_us=time_us(),
            diagnoses=tuple(facts.diagnoses),
            version=self._version,
            served_names=tuple(facts.served_names),
            awaited_s=facts.awaited_s,
            yielded=self._quiet(),
            fleet_id=self._fleet_id,
        )

    async def send(self, state: EngineState | None = None) -> None:
        """Send a heartbeat now. While NATS is not connected, none is sent, because old heartbeats are useless."""
        if not self._client.is_connected:
            return
        with suppress(NatsError):  # the connection was lost at this moment; the next heartbeat is a second away
            await self._client.publish(alive_subject(self._outbox.worker_id), self.heartbeat(state).pack())

    async def run(self) -> None:
        while True:
            await self.send()
            await anyio.sleep(self._every_s)


def time_us() -> int:
    """Microseconds since 1970."""
    return int(time() * 1_000_000)
