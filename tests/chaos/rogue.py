"""A publisher with its own credentials, for one worker, that does everything it can to harm the others of its fleet."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import time_ns
from typing import Any

import anyio
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.bus.control import ControlReply
from kvatlas.bus.subjects import alive_subject, control_subject, events_subject, grant_subject
from kvatlas.incarnation import RANDOM_BITS
from kvatlas_cli.auth.nats_users import inbox_of
from tests.chaos.credentials import PASSWORD, ROGUE
from tests.chaos.fleet import PARTITIONS, Fleet
from tests.fuzz.borders import heartbeat_of, message_of
from tests.fuzz.values import pack, packed

FLOOD = 50
"""Number of heartbeats and of grant requests in each round."""
CLEARED = 20_000
"""Number of events in one message."""
PAUSE_S = 0.02
MAX_SNAPSHOT = 1 << 40
BEGIN, END, CLEARED_EVENT = [4], [6, 0, [0] * 15], [3]


class RoguePublisher:
    """Speaks for the victims on their subjects and on its own, floods, and sends extreme values. `refused`: what NATS refused.
    Its own worker stays without blocks, because it stores them in a tenant that is not its own."""

    def __init__(self, client: Client, victims: Sequence[str], rng: random.Random, refused: set[str]) -> None:
        self.refused = refused
        self.rounds = 0
        self._client = client
        self._victims = victims
        self._rng = rng

    async def run(self) -> None:
        """Attack until cancelled."""
        for victim in self._victims:
            await self._client.subscribe(control_subject(victim), cb=self._answer_falsely)
        while True:
            await self.attack()
            await anyio.sleep(PAUSE_S)

    async def attack(self) -> None:
        """One round. Raises NatsError while NATS is away."""
        victim = self._rng.choice(self._victims)
        for name in (victim, ROGUE):  # on the victim's subjects, and on its own in the victim's name
            await self._client.publish(events_subject(name, PARTITIONS), pack(_emptied(victim)))
            await self._client.publish(alive_subject(name), pack(_beat(victim, lead_ms=60_000)))
            await self._client.publish(grant_subject(name, PARTITIONS), pack(_grant(victim)), reply=self._inbox())
        for _ in range(FLOOD):
            await self._client.publish(
                alive_subject(ROGUE), pack(_beat(ROGUE, lead_ms=self._rng.choice([0, 1 << 30, 1 << 40])))
            )
            await self._client.publish(alive_subject(ROGUE), packed(self._rng, _beat(ROGUE)))
            await self._client.publish(grant_subject(ROGUE, PARTITIONS), pack(_grant(ROGUE)), reply=self._inbox())
        own = events_subject(ROGUE, PARTITIONS)
        for payload in (
            pack(_emptied(ROGUE)),
            pack([*_emptied(ROGUE)[:6], [CLEARED_EVENT] * CLEARED]),
            pack(message_of(self._rng, ROGUE)),
            *(packed(self._rng, message_of(self._rng, ROGUE)) for _ in range(5)),
        ):
            await self._client.publish(own, payload)
        await self._client.flush(timeout=5)
        self.rounds += 1

    async def _answer_falsely(self, msg: Msg) -> None:
        worker_id = msg.subject.rpartition(".")[2]
        reply = ControlReply(ok=True, worker_id=worker_id, incarnation=1, acked_seq=0, digest=[0] * 15)
        await msg.respond(reply.pack())

    def _inbox(self) -> str:
        return f"{inbox_of(ROGUE)}.{self._rng.randrange(1 << 30)}"


def _emptied(worker_id: str) -> list[Any]:
    """A message that begins a new, higher incarnation without a block."""
    now_us = time_ns() // 1_000
    return [1, worker_id, (now_us // 1_000 + 60_000) << RANDOM_BITS, 0, now_us, {}, [BEGIN, END]]


def _beat(worker_id: str, lead_ms: int = 0) -> dict[str, Any]:
    """A heartbeat of an engine that is down, which reports messages that do not exist."""
    beat = heartbeat_of(worker_id)
    incarnation = (time_ns() // 1_000_000 + lead_ms) << RANDOM_BITS
    return {**beat, "incarnation": incarnation, "endpoint": {**beat["endpoint"], "tenant_id": ROGUE}}


def _grant(worker_id: str) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "incarnation": time_ns() // 1_000_000 << RANDOM_BITS,
        "snapshot_bytes": MAX_SNAPSHOT,
    }


@asynccontextmanager
async def rogue_publisher(fleet: Fleet, rng: random.Random) -> AsyncIterator[RoguePublisher]:
    """Connected as the rogue's user. Raises NatsError if NATS is away."""
    refused: set[str] = set()

    async def note(error: Exception) -> None:
        refused.add(str(error).lower())

    client = await nats.connect(
        fleet.nats_server.url,
        user=ROGUE,
        password=PASSWORD,
        inbox_prefix=inbox_of(ROGUE).encode(),
        error_cb=note,
        allow_reconnect=False,
        connect_timeout=2,
    )
    try:
        yield RoguePublisher(client, [worker.worker_id for worker in fleet.workers], rng, refused)
    finally:
        with anyio.move_on_after(2, shield=True):
            await client.close()
