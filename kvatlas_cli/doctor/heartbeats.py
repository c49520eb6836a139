"""Listens to the publishers' heartbeats."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import ControlOp
from kvatlas.bus.control_requests import ask_publishers
from kvatlas.bus.subjects import ALL_ALIVE
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineState, Heartbeat

STATUS_S = 1.0

Told = Callable[[str], None]
"""Called with a line that describes the current step."""


@dataclass(slots=True)
class HeartbeatListener:
    """The last heartbeat of each worker, and how far its clock is ahead, judging by its least delayed heartbeat. `yielded`:
    heartbeats of publishers that gave way to another publisher of the same worker."""

    yielded: dict[str, Heartbeat] = field(default_factory=dict)
    heard: dict[str, Heartbeat] = field(default_factory=dict)
    ahead_us: dict[str, int] = field(default_factory=dict)
    malformed: str = ""

    async def on_heartbeat(self, msg: Msg) -> None:
        try:
            heartbeat = Heartbeat.unpack(msg.data)
        except InvalidValue as error:
            self.malformed = f"{msg.subject}: {error}"
            return
        if not heartbeat.worker_id == heartbeat.endpoint.id == msg.subject.rpartition(".")[2]:
            self.malformed = (
                f"{msg.subject}: heartbeat of worker {heartbeat.worker_id}, endpoint {heartbeat.endpoint.id}"
            )
            return
        now_us = time.time_ns() // 1_000
        if heartbeat.yielded:
            self.yielded[heartbeat.worker_id] = heartbeat
            return
        self.heard[heartbeat.worker_id] = heartbeat
        if heartbeat.sent_us:
            ahead_us = heartbeat.sent_us - now_us
            self.ahead_us[heartbeat.worker_id] = max(ahead_us, self.ahead_us.get(heartbeat.worker_id, ahead_us))

    @property
    def hears_up(self) -> bool:
        """True if an engine that is up has been heard."""
        return any(one.state is EngineState.UP for one in self.heard.values())

    def drop_other_fleets(self, fleet_id: str | None) -> dict[str, list[str]]:
        """Forget workers of fleets other than this one, and return their ids by fleet. If `fleet_id` is None, the fleet
        is unknown, so none are forgotten."""
        found: dict[str, list[str]] = {}
        for id, one in sorted(self.heard.items()):
            theirs = one.fleet_id
            if theirs is not None and fleet_id not in (None, theirs):
                found.setdefault(theirs, []).append(id)
                del self.heard[id]
        return found

    async def start(self, client: Client) -> Subscription:
        """Listen until the subscription ends."""
        return await client.subscribe(ALL_ALIVE, cb=self.on_heartbeat)


@dataclass(frozen=True, slots=True)
class Heard:
    """Publishers' reports: the last heartbeat of each worker, and the status of those that answered in time."""

    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict)
    statuses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


async def hear_workers(nats: NatsAccess, listen_s: float) -> Heard:
    """Listen to publishers for this long, then ask the ones heard from for their status. Raises Unreachable."""
    client = await connect_nats(nats, name="kvatlas-doctor", wait=False)
    try:
        listener = HeartbeatListener()
        await listener.start(client)
        await anyio.sleep(listen_s)
        heartbeats = dict(listener.heard)
        replies = await ask_publishers(client, heartbeats, ControlOp.STATUS, STATUS_S)
        return Heard(heartbeats, {id: reply.status for id, reply in replies.items() if reply.status is not None})
    finally:
        await client.close()
