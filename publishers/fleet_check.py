"""Checks that the NATS server belongs to the publisher's fleet, if the fleet id is set. The indexers answer.

The publisher asks before it publishes anything, and repeatedly after that. If there is no answer, it continues: no indexer
could assign its workers to another fleet, and an indexer that starts later sees the fleet id in the heartbeats.
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
    """Call `ask`, then `run` (until cancelled). Both raise OtherFleet."""

    def __init__(
        self, client: Client, fleet_id: str, workers: str, nats_name: str, every_s: float = ASK_EVERY_S
    ) -> None:
        """`workers`: the ids of the published workers, as one line of text."""
        self._client = client
        self._fleet_id = fleet_id
        self._question = FleetIdentity(fleet=fleet_id, member=workers, publisher=True).pack()
        self._nats = nats_name
        self._every_s = every_s

    async def ask(self) -> None:
        """Ask once. Raises OtherFleet if the indexers on this NATS belong to another fleet."""
        try:
            reply = await self._client.request(fleet_subject(self._fleet_id), self._question, timeout=ANSWER_S)
            found = FleetIdentity.unpack(reply.data)
        except (NatsError, TimeoutError, InvalidValue):
            return
        if found.fleet != self._fleet_id:
            raise OtherFleet(
                f"{self._nats} is of fleet {found.fleet} (indexer {found.member}); expected fleet {self._fleet_id}, as "
                "--fleet-id says; give each fleet its own NATS (or account)"
            )

    async def run(self) -> None:
        """Ask repeatedly."""
        while True:
            await anyio.sleep(self._every_s)
            await self.ask()
