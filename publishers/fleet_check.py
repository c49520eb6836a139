"""A publisher that was given its fleet's id asks whose NATS this is: the indexers there answer.

It asks before it publishes anything, and now and then later. Without an answer it goes on: no indexer is there that would take
its workers for another fleet's, and its heartbeats have the id, by which an indexer that comes later knows it.
"""

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.bus.subjects import fleet_subject
from kvatlas.errors import InvalidValue, OtherFleet
from kvatlas.fleet.fleet_identity import FleetIdentity

ANSWER_S = 1.0
ASK_EVERY_S = 30.0


class FleetCheck:
    """`ask`, then `run` until cancelled. Both raise OtherFleet."""

    def __init__(
        self, client: Client, fleet_id: str, workers: str, nats_name: str, every_s: float = ASK_EVERY_S
    ) -> None:
        """`workers`: those that are published, in a line."""
        self._client = client
        self._fleet_id = fleet_id
        self._question = FleetIdentity(fleet=fleet_id, member=workers, publisher=True).pack()
        self._nats = nats_name
        self._every_s = every_s

    async def ask(self) -> None:
        """Once. Raises OtherFleet if the indexers on this NATS are of another fleet."""
        try:
            reply = await self._client.request(fleet_subject(self._fleet_id), self._question, timeout=ANSWER_S)
            found = FleetIdentity.unpack(reply.data)
        except (NatsError, TimeoutError, InvalidValue):
            return
        if found.fleet != self._fleet_id:
            raise OtherFleet(
                f"{self._nats} is of fleet {found.fleet} (indexer {found.member}); expected fleet {self._fleet_id}, as "
                "--fleet-id says; give each fleet a NATS (or an account) of its own"
            )

    async def run(self) -> None:
        """Ask again and again."""
        while True:
            await anyio.sleep(self._every_s)
            await self.ask()
