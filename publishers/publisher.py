"""The embeddable publisher of one worker.

    async with Publisher(PublisherSettings(worker_id="w1", model_id="m"), nats="nats://127.0.0.1:4222") as publisher:
        names = await publisher.stored(token_ids, block_size=16)
        await publisher.removed(names[-1:])
        await publisher.flush()

Several publishers may share one NATS connection.
"""

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from time import monotonic, time_ns
from types import TracebackType
from typing import Any, Self

import anyio
from nats.aio.client import Client

from kvatlas.blocks.hashing import ExtraKeys
from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import UNGRANTED_SNAPSHOT_BYTES, GrantRequest
from kvatlas.bus.subjects import events_subject
from kvatlas.errors import InvalidValue
from kvatlas.events import EngineBatch, EngineCleared, EngineHash, EngineRemoved, EngineStored
from kvatlas.fleet.records import EngineState, WorkerState
from kvatlas.identity import partition_of
from kvatlas.runtime.rate_limited_log import Complaints
from kvatlas.runtime.wakeup import Waking
from kvatlas.telemetry import export_metrics, flush_span, inject_headers
from publishers.block_names import block_names
from publishers.control import ControlDesk
from publishers.counters import PublisherCounters
from publishers.duplicate_publisher import Rivalry
from publishers.engines.poller import EnginePoller
from publishers.heartbeat import Pulse, time_us
from publishers.ledger.ledger import Ledger
from publishers.settings import PublisherSettings
from publishers.stream.changelog import Telling, Want
from publishers.stream.grants import await_grant
from publishers.stream.message_split import block_count
from publishers.stream.sender import Sender

LINGER_S = 0.005
CLOSE_S = 2.0
HEADERS_BYTES = 1024
"""Room for trace context beside a message's payload."""
LINGER_EVENTS = 2048
"""So many engine events waiting are folded at once."""

log = logging.getLogger("kvatlas.publisher")


class Publisher:
    """Tells the index what one worker holds. `async with`: its tasks live inside.

    What is told never waits for the network: the outbox is bounded, and when it overflows the ledger is told anew.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        *,
        nats: Client | str,
        ledger: Ledger | None = None,
        saved_incarnation: int = 0,
        begin: bool = True,
        rng: random.Random | None = None,
    ) -> None:
        """`nats`: a connection, or an URL to connect to (with back-off, for ever). `ledger`: one that was saved.

        `begin` False: nothing is told before `begin_telling`. Raises InvalidValue for settings that can't be.
        """
        self.settings = settings
        self.worker_id = settings.worker_id
        self.counters = PublisherCounters()
        self.ledger = ledger or Ledger(settings.ledger)
        self.poller: EnginePoller | None = None
        self.feed_alive: Callable[[], bool] | None = None
        """where there is no URL: is the engine's feed connected?"""
        self._rng = rng or random.Random()
        self._nats = nats
        self._begin = begin
        self._waking = Waking()
        self._wanting = Waking()
        self._beating = Waking()
        self._progress = anyio.Event()
        self._first_pending_s = 0.0
        self._first_pending_ns = 0
        self._stack = AsyncExitStack()
        self._complaints = Complaints(log, f"worker {self.worker_id}: ")
        self.telling = Telling(
            self.worker_id,
            self.ledger,
            self.counters,
            limits=settings.outbox,
            checkpoints=settings.checkpoints,
            saved_incarnation=saved_incarnation,
            rng=self._rng,
        )
        if settings.engine_url:
            self.poller = EnginePoller(settings.engine_url, settings.load_context, self.counters, on_change=self.beat)

    # ---------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if isinstance(self._nats, str):
                self._client = await connect_nats(self._nats, name=f"kvatlas-publisher-{self.worker_id}")
                stack.push_async_callback(_close, self._client)
            else:
                self._client = self._nats
            self.telling.outbox.fit(self._client.max_payload - HEADERS_BYTES)
            self._sender = Sender(
                self._client,
                self.telling.outbox,
                events_subject(self.worker_id, self.settings.partitions),
                self.counters,
                on_progress=self._on_progress,
            )
            self._pulse = Pulse(
                self._client,
                lambda: self.settings.endpoint(self.block_size),
                self.telling.outbox,
                self.counters,
                state=lambda: self.engine_state,
                load=lambda: self.load,
                quiet=lambda: self.telling.yielded,
            )
            control = ControlDesk(
                self._client,
                self.worker_id,
                self.telling,
                self.counters,
                self._complaints,
                status=self.status,
                on_wanted=self._wanting.wake,
                checkpoint=self.checkpoint,
            )
            rivalry = Rivalry(self._client, self.worker_id, self.telling, self.counters, on_wanted=self._wanting.wake)
            await self._sender.start()
            stack.push_async_callback(self._sender.stop)
            await control.start()
            stack.push_async_callback(control.stop)
            await rivalry.start()
            stack.push_async_callback(rivalry.stop)
            worker = {"worker": self.worker_id}
            stack.enter_context(export_metrics("publisher", self.counters, worker))
            stack.enter_context(export_metrics("ledger", self.ledger.counters, worker))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(self._sender.run)
            tasks.start_soon(self._keep_folding)
            tasks.start_soon(self._keep_beginning)
            tasks.start_soon(self._pulse.run)
            tasks.start_soon(self._keep_beating)
            tasks.start_soon(control.run)
            tasks.start_soon(rivalry.run)
            if self.poller is not None:
                tasks.start_soon(self.poller.run)
            if self._begin:
                self.begin_telling()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)

    async def close_gently(self, deadline_s: float = 2.0) -> None:
        """Before leaving: all is told that can be within the deadline, and routers hear that the worker is draining.

        The worker is not retired: whoever tells of it next, within the index' patience, goes on from here.
        """
        with anyio.move_on_after(deadline_s, shield=True):
            await self._pulse.beat(EngineState.DRAINING)
            if self.telling.outbox.incarnation and not self.telling.yielded:
                await self.flush()
            await self._pulse.beat(EngineState.DRAINING)  # with the last acknowledged seq
            if self._client.is_connected:
                await self._client.flush()

    # ---------------------------------------------------------------- what the engine holds

    async def stored(
        self,
        what: EngineStored | Sequence[int],
        *,
        parent: EngineHash | None = None,
        block_size: int | None = None,
        tier: Tier | str = Tier.HBM,
        adapter: str | None = None,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKeys] | None = None,
    ) -> Sequence[EngineHash]:
        """Blocks were stored: an engine's event, or token ids with what tells their scope. The blocks' names.

        With token ids the names are made here, for `parent` of what follows and for `removed`; `parent` is the name of
        the block before the first, and only full blocks are stored. Raises InvalidValue for token ids that can't be
        hashed, for a parent that is no such name, and without a block size.
        """
        if not isinstance(what, EngineStored):
            size = block_size or self.settings.block_size
            if size is None:
                raise InvalidValue("token ids without a block size; expected block_size here or in the settings")
            names = block_names(what, size, parent, adapter, salt, extra_keys)
            what = EngineStored(
                hashes=names,
                parent=parent,
                token_ids=what[: len(names) * size],
                block_size=size,
                tier=_tier(tier),
                adapter=adapter,
                salt=salt,
                extra_keys=extra_keys,
            )
        self.take(EngineBatch([what]))
        return what.hashes

    async def removed(self, what: EngineRemoved | Sequence[EngineHash], *, tier: Tier | str = Tier.HBM) -> None:
        """One copy of each block is gone: an engine's event, or the blocks' names, child first."""
        self.take(EngineBatch([what if isinstance(what, EngineRemoved) else EngineRemoved(what, _tier(tier))]))

    async def cleared(self, what: EngineCleared | None = None, *, tiers: Sequence[Tier | str] = (Tier.HBM,)) -> None:
        """All blocks of the tiers are gone."""
        self.take(EngineBatch([what or EngineCleared(tuple(_tier(tier) for tier in tiers))]))

    def take(self, batch: EngineBatch) -> None:
        """An engine's batch. It is folded with what comes within the next 5 ms, at once where nothing is under way."""
        before = self.telling.pending_events
        self.telling.take(batch)
        for line in batch.skipped:
            self._complaints.say(f"skipped {line[:24]}", f"event skipped: {line}")
        if not before:
            self._first_pending_s = monotonic()
            self._first_pending_ns = time_ns()
        if not before or before < LINGER_EVENTS <= self.telling.pending_events:
            self._waking.wake()

    def start_over(self) -> None:
        """What the engine holds is not known any more: it is told anew, beginning with nothing."""
        self.telling.start_over()
        self._wanting.wake()

    def begin_telling(self) -> None:
        """Begin the first incarnation with what the ledger holds."""
        self.telling.want(Want.START)
        self._wanting.wake()

    async def flush(self) -> None:
        """Returns when all that was taken before is acknowledged by the stream: later, while NATS is away."""
        while not self.telling.settled:
            self._waking.wake()
            await self._progress.wait()

    # ---------------------------------------------------------------- what is known

    @property
    def engine_state(self) -> EngineState:
        """As its health says; without an URL, as its feed does; without a feed it is up."""
        if self.poller is not None:
            return self.poller.state
        return EngineState.UP if self.feed_alive is None or self.feed_alive() else EngineState.DOWN

    @property
    def load(self) -> WorkerState | None:
        return self.poller.load if self.poller is not None else None

    def status(self) -> dict[str, Any]:
        """Everything an operator may ask, as JSON types."""
        outbox = self.telling.outbox
        return {
            "worker_id": self.worker_id,
            "incarnation": outbox.incarnation,
            "told_seq": outbox.next_seq - 1,
            "acked_seq": outbox.acked_seq,
            "waiting_messages": outbox.waiting,
            "wanted": self.telling.wanted.value if self.telling.wanted else None,
            "yielded": self.telling.yielded,
            "trouble": self._sender.trouble,
            "engine_state": self.engine_state.value,
            "announced": self.ledger.digest.blocks,
            "block_size": self.ledger.block_size,
            "counters": self.counters.to_jsonable(),
            "ledger": asdict(self.ledger.counters),
        }

    def beat(self) -> None:
        """Send a heartbeat now, out of turn."""
        self._beating.wake()

    # ---------------------------------------------------------------- tasks

    async def _keep_folding(self) -> None:
        """Folds what was taken: at once while nothing is under way to the stream, else after lingering."""
        while True:
            await self._waking.wait(self.telling.checkpoint_in(monotonic()))
            if self.telling.pending_events:
                while self.telling.outbox.in_flight and self.telling.pending_events < LINGER_EVENTS:
                    left_s = self._first_pending_s + LINGER_S - monotonic()
                    if left_s <= 0 or not await self._waking.wait(left_s):
                        break
                self.settle()
            if self.telling.checkpoint_in(monotonic()) == 0:
                self.telling.checkpoint(time_us())
                self._sender.wake()

    @property
    def block_size(self) -> int | None:
        """Tokens a block: as the events say, before the first one as the engine's metrics say."""
        return self.ledger.block_size or (self.poller.block_size if self.poller is not None else None)

    def settle(self) -> None:
        """Fold what is pending into the ledger now, tell the change, have it sent. One span."""
        pending = self.telling.pending_events
        known_size = self.block_size
        events = self.telling.fold()
        if self.block_size != known_size:
            self.beat()  # routers can't look up a prompt before they know it
        if events:
            with flush_span(
                self.worker_id,
                messages=1,
                events=len(events),
                blocks=block_count(events),
                started_ns=self._first_pending_ns,
            ):
                if self.telling.tell(events, time_us(), monotonic(), inject_headers()):
                    self._sender.wake()
                elif self.telling.wanted is not None:
                    self._wanting.wake()
        elif pending:
            self._signal_progress()  # it changed nothing: a flush that waits for it is done

    def checkpoint(self) -> None:
        """Fold and tell what is pending, and a checkpoint of it all, out of turn."""
        self.settle()
        self.telling.checkpoint(time_us())
        self._sender.wake()

    async def _keep_beginning(self) -> None:
        """Begins the wanted incarnations: while the stream takes messages, large ones under a grant."""
        while True:
            await self._wanting.wait()
            while self.telling.wanted is not None:
                if not self._sender.well or self.telling.yielded:
                    await self._wanting.wait(1.0)
                    continue
                try:
                    incarnation = self.telling.reserve(time_us())
                except InvalidValue as error:
                    self._complaints.say("incarnation", str(error))
                    await anyio.sleep(1.0)
                    continue
                size = self.telling.snapshot_bytes
                if size > UNGRANTED_SNAPSHOT_BYTES:
                    request = GrantRequest(worker_id=self.worker_id, incarnation=incarnation, snapshot_bytes=size)
                    partition = partition_of(self.worker_id, self.settings.partitions)
                    await await_grant(self._client, partition, request, self.counters, self._rng)
                why = self.telling.wanted
                if self._sender.well and self.telling.begin(incarnation, time_us()):
                    log.info(
                        "worker %s: incarnation %d begins with %d blocks (%s)",
                        self.worker_id,
                        incarnation,
                        self.ledger.digest.blocks,
                        why,
                    )
                    self._sender.wake()
                    self._beating.wake()

    async def _keep_beating(self) -> None:
        while True:
            await self._beating.wait()
            await self._pulse.beat()

    def _on_progress(self) -> None:
        if self.telling.wanted is not None:
            self._wanting.wake()
        if self.telling.outbox.empty:
            if self.telling.pending_events:
                self._waking.wake()
            self._signal_progress()

    def _signal_progress(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()


def _tier(tier: Tier | str) -> Tier:
    return tier if isinstance(tier, Tier) else parse_tier(tier)


async def _close(client: Client) -> None:
    with anyio.move_on_after(CLOSE_S, shield=True):
        await client.close()
