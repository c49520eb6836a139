"""Keeps two fleets apart: an indexer starts only if its store and its NATS belong to the same fleet (thin: the rules are in
`conflict_line`)."""

import logging

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.stream import mark_stream, stream_fleet
from kvatlas.bus.subjects import ALL_FLEETS, fleet_subject, is_inbox
from kvatlas.errors import InvalidValue, KvatlasError, OtherFleet
from kvatlas.fleet.fleet_identity import FleetIdentity, new_fleet_id
from kvatlas.fleet_store.fleet_identity import read_store_identity, write_store_identity
from kvatlas.fleet_store.startup_failures import report_trouble
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.store.connection import Store

ANSWER_S = 1.0
CHECK_S = 15.0
_CURE = "give each fleet its own NATS (or account), or the same --redis-url (to move a store: --fleet-id)"

log = logging.getLogger("kvatlas.indexer")


class FleetGuard:
    """Call `join`, then `run` until cancelled."""

    def __init__(self, client: Client, store: Store, member_id: str, nats_name: str, joins: str | None = None) -> None:
        """`joins`: the fleet that this indexer is configured for; an empty store may then join it."""
        self._joins = joins
        self._client = client
        self._store = store
        self._member_id = member_id
        self._nats = nats_name
        self._log = RateLimitedLog(log)
        self._own: FleetIdentity | None = None

    @property
    def fleet_id(self) -> str | None:
        """The fleet's id; None before `join`."""
        return self._own.fleet if self._own is not None else None

    async def join(self) -> FleetIdentity:
        """Check that the store and the stream belong to one fleet, and mark them if they are not marked yet. Raises
        OtherFleet."""
        ours, streams = await read_store_identity(self._store), await stream_fleet(self._client)
        if (line := self._other_than_wanted(ours, streams)) is not None:
            raise OtherFleet(line)
        wanted = streams or (ours.fleet if ours is not None else self._joins or new_fleet_id())
        joins = ours is None and self._joins == streams
        if streams and not joins and (ours is None or ours.fleet != streams):
            other = await self._ask(streams, ours)
            if (line := conflict_line(ours, streams, other, self._store.name, self._nats)) is not None:
                raise OtherFleet(line)
        own = await self._take_store(wanted)
        if not streams:
            await mark_stream(self._client, own.fleet)
        return own

    def _other_than_wanted(self, ours: FleetIdentity | None, streams: str | None) -> str | None:
        """Why the --fleet-id does not fit; None if it fits or is not set."""
        wanted = self._joins
        for what, found in ((self._nats, streams), (self._store.name, ours.fleet if ours is not None else None)):
            if wanted is not None and found not in (None, wanted):
                return f"{what} is of fleet {found}; expected fleet {wanted}, as --fleet-id says; {_CURE}"
        return None

    async def _take_store(self, fleet_id: str) -> FleetIdentity:
        own = await write_store_identity(self._store, fleet_id)
        self._own = own.model_copy(update={"store_name": self._store.name, "member": self._member_id})
        return self._own

    async def run(self) -> None:
        """Answer indexers that start with a different store, and mark the store and the stream again if they have lost their
        mark."""
        subscription = await self._client.subscribe(ALL_FLEETS, cb=self._on_question)
        try:
            while True:
                await anyio.sleep(CHECK_S)
                try:
                    await self._check()
                except (KvatlasError, RedisError) as error:
                    log.debug("fleet was not checked: %s", error)
        finally:
            await unsubscribe(subscription, self._client)

    async def _check(self) -> None:
        if (own := self._own) is None:
            return
        own = await self._take_store(own.fleet)  # the store may have lost all its data
        streams = await stream_fleet(self._client)
        if streams is None:
            await mark_stream(self._client, own.fleet)
        elif streams != own.fleet:
            line = f"{self._nats} belongs to fleet {streams} now, and {self._store.name} to fleet {own.fleet}; {_CURE}"
            self._log.report("fleet", line)
            await report_trouble(self._store, self._member_id, line)

    async def _ask(self, fleet_id: str, ours: FleetIdentity | None) -> FleetIdentity | None:
        """The identity of the fleet's live indexer; None if none answers."""
        question = FleetIdentity(
            fleet=ours.fleet if ours is not None else fleet_id,
            store=ours.store if ours is not None else "",
            store_name=self._store.name,
            member=self._member_id,
        )
        try:
            reply = await self._client.request(fleet_subject(fleet_id), question.pack(), timeout=ANSWER_S)
            return FleetIdentity.unpack(reply.data)
        except (NatsError, TimeoutError, InvalidValue):
            return None

    async def _on_question(self, msg: Msg) -> None:
        own = self._own
        try:
            asking = FleetIdentity.unpack(msg.data)
        except InvalidValue:
            return
        if own is None or asking.member == own.member or not is_inbox(msg.reply):
            return
        if asking.publisher:
            await self._answer_publisher(own, asking, msg.reply)
            return
        try:
            stored = await read_store_identity(self._store)
        except (KvatlasError, RedisError):
            return
        if stored is None or stored.store in (asking.store, "") or stored.store != own.store:
            return  # it has the same store, or one that has just lost all its data
        line = (
            f"indexer {asking.member} of another fleet, with the store {asking.store_name}, uses this NATS; it was refused: "
            f"give its fleet its own NATS (or account), or this fleet's store, {own.store_name}"
        )
        self._log.report(f"fleet {asking.member}", line)
        await self._client.publish(msg.reply, own.pack())

    async def _answer_publisher(self, own: FleetIdentity, asking: FleetIdentity, inbox: str) -> None:
        """Answer a publisher, which learns the fleet of this NATS and nothing about the store."""
        if asking.fleet != own.fleet:
            line = (
                f"a publisher of another fleet, {asking.fleet}, uses this NATS, for {asking.member}; it was refused: "
                "give its fleet its own NATS (or account)"
            )
            self._log.report(f"fleet {asking.member}", line)
        await self._client.publish(inbox, FleetIdentity(fleet=own.fleet, member=own.member).pack())


def conflict_line(
    ours: FleetIdentity | None, streams: str, other: FleetIdentity | None, store_name: str, nats_name: str
) -> str | None:
    """Why an indexer with this store must not use this NATS; None if it may. `ours`: the store's identity, None for an
    empty store; `streams`: the fleet of the event stream; `other`: a live indexer of that fleet that uses a different store."""
    if other is not None:
        kept = f"its indexer {other.member} uses the store {other.store_name}"
        return f"{nats_name} belongs to fleet {streams}: {kept}, and this one has {store_name}; {_CURE}"
    if ours is not None and ours.fleet != streams:
        stream = "or, if that fleet no longer exists, delete the stream KVATLAS_EVENTS"
        return f"{nats_name} belongs to fleet {streams}, and {store_name} to fleet {ours.fleet}; {_CURE}; {stream}"
    return None
