"""The embeddable publisher of one worker.

    async with Publisher(PublisherSettings(worker_id="w1", model_id="m"), nats="nats://127.0.0.1:4222") as publisher:
        names = await publisher.stored(token_ids, block_size=16)
        await publisher.removed(names[-1:])
        await publisher.flush()

Several publishers may share one NATS connection.
"""

import logging
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from time import monotonic
from types import TracebackType
from typing import Any, Self

import anyio
from nats.aio.client import Client

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import events_subject
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineState, KvConnector
from kvatlas.incarnation import check_incarnation
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.runtime.wakeup import Wakeup
from kvatlas.telemetry import export_metrics
from kvatlas_publishers.block_recorder import BlockRecorder
from kvatlas_publishers.control_requests.control import ControlResponder
from kvatlas_publishers.control_requests.hash_responder import EngineHashesResponder
from kvatlas_publishers.control_requests.responder import Responder
from kvatlas_publishers.counters import PublisherCounters, PublisherGauges
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.duplicate_publisher import DuplicatePublisherWatch
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared
from kvatlas_publishers.engine_view import EngineView
from kvatlas_publishers.heartbeat import HeartbeatSender, time_us
from kvatlas_publishers.incarnation_starter import IncarnationStarter
from kvatlas_publishers.ledger.connectors.connector_blocks import TICKS_TO_LIVE
from kvatlas_publishers.ledger.engine_groups import ReuseOfGroups
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.parts import PublisherParts
from kvatlas_publishers.self_report import SelfReport
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_publishers.shared_store.notifier import StoreNotifier
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from kvatlas_publishers.stream.fold_loop import FoldLoop
from kvatlas_publishers.stream.sender import Sender
from kvatlas_publishers.version_diagnosis import VersionDiagnosis

CLOSE_S = 2.0
HEADERS_BYTES = 1024
"""Space for trace context in addition to a message's payload."""
STORE_TTL_S = 60
INTAKE_S = 1.0

log = logging.getLogger("kvatlas.publisher")


class Publisher(BlockRecorder):
    """Publishes one worker's blocks. Its tasks run inside `async with`.

    Recording never waits for the network. The outbox is bounded, and after an overflow a new incarnation starts with a snapshot
    of the ledger.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        *,
        nats: Client | NatsAccess | str,
        ledger: Ledger | None = None,
        saved_incarnation: int = 0,
        begin: bool = True,
        rng: random.Random | None = None,
        feed_alive: Callable[[], bool] | None = None,
        has_replay: bool = False,
        on_engine_change: Callable[[EngineState], None] = lambda _: None,
        on_engine_restart: Callable[[], None] = lambda: None,
        on_start_over: Callable[[], None] = lambda: None,
    ) -> None:
        """`nats`: a connection, or an address to connect to (retried forever, with back-off). `ledger`: a saved ledger.

        `begin=False`: nothing is published before `begin_publishing`. `feed_alive`: True if the engine's feed is connected;
        used without an engine URL. `has_replay`: True if lost events can be replayed. `on_engine_change`: called when the
        engine's state changes; `on_engine_restart`: called when its process is replaced (both need an engine URL).
        `on_start_over`: called when all known blocks have been dropped. Raises InvalidValue for invalid settings.
        """
        self.settings = settings
        self.worker_id = settings.worker_id
        self.counters = PublisherCounters()
        self.diagnoses = Diagnoses(self.worker_id)
        self.ledger = ledger or Ledger(settings.ledger)
        self._version_diagnosis = VersionDiagnosis(self.diagnoses)
        self._store_notifier: StoreNotifier | None = None
        self._nats = nats
        self._begin = begin
        self._has_replay = has_replay
        self._on_engine_change = on_engine_change
        self._on_start_over = on_start_over
        self._heartbeat_wakeup = Wakeup()
        self._stack = AsyncExitStack()
        self._log = RateLimitedLog(log, f"worker {self.worker_id}: ")
        try:
            check_incarnation(saved_incarnation, time_us())
        except InvalidValue as error:
            log.warning("worker %s: saved incarnation ignored: %s", self.worker_id, error)
            saved_incarnation = 0
        rng = rng or random.Random()
        self.changelog = Changelog(
            self.worker_id,
            self.ledger,
            self.counters,
            limits=settings.outbox,
            checkpoints=settings.checkpoints,
            saved_incarnation=saved_incarnation,
            rng=rng,
        )
        self._parts = PublisherParts(settings, self.changelog, self.counters, self.diagnoses, self._log, rng)
        self._due = self._parts.due
        self._fold_loop = FoldLoop(self._parts, on_published=lambda: self._sender.wake())
        poller = None
        if settings.engine_url:
            from kvatlas_publishers.engines.poller import EnginePoller  # needs httpx: 6 MiB

            poller = EnginePoller(
                settings.engine_url,
                settings.load_context,
                self.counters,
                self.diagnoses,
                on_change=self._on_engine_state,
                on_restart=on_engine_restart,
                on_adapter_moved=self.forget_adapter,
                on_new_weights=self._on_new_weights,
                on_block_bytes=self.ledger.set_told_block_bytes,
                sizes=lambda: self.ledger.sizes,
                on_hybrid=self._on_hybrid,
                on_version=self._look_at_version,
                feed_alive=feed_alive or (lambda: False),
                access=settings.engine_access,
            )
        self.engine = EngineView(settings, self.ledger, self.diagnoses, poller=poller, feed_alive=feed_alive)

    # ---------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if isinstance(self._nats, (NatsAccess, str)):
                self._client = await connect_nats(self._nats, name=f"kvatlas-publisher-{self.worker_id}")
                stack.push_async_callback(_close, self._client)
            else:
                self._client = self._nats
            self._parts.client = self._client
            self.changelog.outbox.limit_message_bytes(self._client.max_payload - HEADERS_BYTES)
            self._sender = Sender(
                self._client,
                self.changelog.outbox,
                events_subject(self.worker_id, self.settings.partitions),
                self.counters,
                fleet_id=self.settings.fleet_id,
                on_progress=self._on_progress,
                on_too_large=self._on_too_large,
            )
            self._report = SelfReport(self._parts, self.engine, self._sender, has_replay=self._has_replay)
            self._heartbeats = HeartbeatSender(
                self._client,
                lambda: self.settings.endpoint(
                    self.engine.block_size, self.ledger.sizes, self.ledger.reuse, self.ledger.chain
                ),
                self.changelog.outbox,
                state=lambda: self.engine.state,
                load=lambda: self.engine.load,
                doctor_facts=self._report.doctor_facts,
                quiet=lambda: self.changelog.yielded,
                fleet_id=self.settings.fleet_id,
            )
            if self.settings.shared_store is not None:
                self._store_notifier = StoreNotifier(self._parts, self.settings.shared_store)
            answering: list[Responder | DuplicatePublisherWatch] = [
                ControlResponder(self._parts, status=self.status, checkpoint=self.checkpoint),
                DuplicatePublisherWatch(self._parts),
            ]
            if self.settings.kv_connector is KvConnector.KVCR:
                answering.append(EngineHashesResponder(self._parts))
            incarnations = IncarnationStarter(self._parts, self._sender, on_begun=self._heartbeat_wakeup.wake)
            await self._sender.start()
            stack.push_async_callback(self._sender.stop)
            for one in answering:
                await one.start()
                stack.push_async_callback(one.stop)
            worker = {"worker": self.worker_id}
            stack.enter_context(export_metrics("publisher", self.counters, worker))
            stack.enter_context(export_metrics("messages_out", self.counters, worker))
            stack.enter_context(export_metrics("ledger", self.ledger.counters, worker))
            stack.enter_context(export_metrics("engine", self._report.gauges, worker))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(self._sender.run)
            tasks.start_soon(self._fold_loop.run, self.settle)
            tasks.start_soon(incarnations.run)
            tasks.start_soon(self._heartbeats.run)
            tasks.start_soon(self._send_extra_heartbeats)
            tasks.start_soon(self._expire_stored)
            tasks.start_soon(self._judge_intake)
            for one in answering:
                tasks.start_soon(one.run)
            if self.engine.poller is not None:
                tasks.start_soon(self.engine.poller.run)
            if self._store_notifier is not None:
                tasks.start_soon(self._store_notifier.run)
            if self._begin:
                self.begin_publishing()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)

    async def close_gently(self, deadline_s: float = 2.0) -> None:
        """Call before shutdown: publish what is possible within the deadline, and report the worker as draining in heartbeats.

        The worker is not retired: its next publisher continues from here if it starts before the index retires the worker.
        """
        with anyio.move_on_after(deadline_s, shield=True):
            await self._heartbeats.send(EngineState.DRAINING)
            if self.changelog.outbox.incarnation and not self.changelog.yielded:
                await self.flush()
            await self._heartbeats.send(EngineState.DRAINING)  # with the last acknowledged seq
            if self._client.is_connected:
                await self._client.flush()

    def drain(self) -> None:
        """Drain the worker, because its engine is about to stop: routers send it no new requests. Until it stops, it
        continues to be published."""
        self.engine.draining = True
        self.beat()

    def undrain(self) -> None:
        """Undo `drain`: the engine has started again."""
        if self.engine.draining:
            self.engine.draining = False
            self.beat()

    # ---------------------------------------------------------------- recording

    def record(self, batch: EngineBatch) -> None:
        """Record an engine's batch. It is folded immediately if nothing is in flight; otherwise together with the batches of
        the next 5 ms."""
        if not self.engine.hear(batch.dp_rank):
            self.counters.feed_unheard += 1
            return
        self._fold_loop.record(batch)
        for line in batch.skipped:
            self.diagnoses.last_unreadable = line
            self._log.report(f"skipped {line[:24]}", f"skipped event: {line}")

    def clear(self) -> None:
        """Drop all known blocks, because the engine's cache was reset or its model has new weights. Call this after resetting
        the cache: the engine reports the reset only with its next batch, perhaps after the next request."""
        self.record(EngineBatch([EngineCleared(tuple(Tier))]))
        self.settle()

    def start_over(self) -> None:
        """Drop everything and begin an empty incarnation, because the engine's blocks are no longer known."""
        self.changelog.start_over(time_us())
        self._on_start_over()
        self._sender.wake()
        self._due.wake()

    def begin_publishing(self) -> None:
        """Begin the first incarnation with the ledger's blocks."""
        self.changelog.require_incarnation(IncarnationReason.START)
        self._due.wake()

    async def flush(self) -> None:
        """Wait until the stream has acknowledged everything recorded before. If NATS is down, this waits until it is back."""
        await self._fold_loop.flush()

    def forget_adapter(self, adapter: str) -> None:
        """Drop the old blocks of an adapter that the engine reloaded from another path."""
        self.settle()
        log.info("worker %s: adapter %s was reloaded from another path; dropping its blocks", self.worker_id, adapter)
        events = self.changelog.forget_adapter(adapter)
        self._notify_store()
        if self.changelog.incarnation_due is not None:
            self._due.wake()
        elif self.changelog.publish(events, time_us(), monotonic()):
            self._sender.wake()

    def settle(self) -> None:
        """Fold pending events into the ledger and publish the change now."""
        counters = self.ledger.counters
        untold_before, chains_before, known = counters.removal_untold, counters.other_chain, self._told_of_blocks()
        events = self._fold_loop.fold()
        if events is None:
            self.start_over()
            return
        self._notify_store()
        if self._told_of_blocks() != known:
            self.beat()  # routers need these facts to look up and price prompts
        self._report.diagnose_block_size()
        self._look_at_version()
        if counters.other_chain != chains_before:
            self._report.diagnose_chain()
        if (untold := counters.removal_untold) and not untold_before:
            line = f"{untold} blocks left out: a connector stored them, and their removal is never reported (see --store-ttl-s)"
            self._log.report("untold", line, logging.INFO)
        self._tell_upper_bound(known[0].upper_bound)
        self._fold_loop.publish(events)

    def _told_of_blocks(self) -> tuple[ReuseOfGroups, int | None, BlockSizes, str | None]:
        """The facts about the worker's blocks that heartbeats report."""
        ledger = self.ledger
        return ledger.reuse, self.engine.block_size, ledger.sizes, ledger.chain

    def _look_at_version(self) -> None:
        version = self.engine.poller.version if self.engine.poller is not None else ""
        self._version_diagnosis.look(self.ledger.counters, version, self.counters.feed_restarts)

    def _on_hybrid(self) -> None:
        before = self.ledger.reuse.upper_bound
        self.ledger.learn_hybrid()
        self._tell_upper_bound(before)
        self.beat()

    def _tell_upper_bound(self, before: str) -> None:
        if (why := self.ledger.reuse.upper_bound) != before and why:
            log.warning("worker %s: %s; its reusable blocks are published as an upper bound", self.worker_id, why)

    def _notify_store(self) -> None:
        if self._store_notifier is not None:
            self._store_notifier.collect()

    def checkpoint(self) -> None:
        """Publish pending events and a checkpoint now, out of turn."""
        self.settle()
        self._fold_loop.checkpoint()

    # ---------------------------------------------------------------- reports

    def gauges(self) -> PublisherGauges:
        """Values for metrics; read on the exporter's thread."""
        return self._report.gauges()

    def status(self) -> dict[str, Any]:
        """Everything that an operator may want to know, as JSON types."""
        return self._report.status()

    def beat(self) -> None:
        """Send a heartbeat now, out of turn."""
        self._heartbeat_wakeup.wake()

    # ---------------------------------------------------------------- tasks

    async def _expire_stored(self) -> None:
        """Expire blocks whose removal is never reported."""
        ttl_s = self.settings.store_ttl_s or STORE_TTL_S  # a saved ledger may have such blocks from another setting
        while True:
            await anyio.sleep(ttl_s / TICKS_TO_LIVE)
            if expired := self.ledger.expire():
                self.record(EngineBatch(expired))

    async def _judge_intake(self) -> None:
        while True:
            self._report.judge_intake(monotonic())
            await anyio.sleep(INTAKE_S)

    async def _send_extra_heartbeats(self) -> None:
        while True:
            await self._heartbeat_wakeup.wait()
            await self._heartbeats.send()

    def _on_engine_state(self, state: EngineState) -> None:
        self._on_engine_change(state)
        if (
            state is EngineState.ASLEEP
        ):  # its cache is gone, but it reports that only with the first batch after waking up
            self.record(EngineBatch([EngineCleared()]))
        self.beat()

    def _on_new_weights(self, version: str) -> None:
        log.warning(
            "worker %s: model weights changed to version %s; dropping all known blocks", self.worker_id, version
        )
        self.clear()

    def _on_too_large(self, seq: int) -> bool:
        if not self.changelog.split_smaller(seq):
            return False
        self._due.wake()
        return True

    def _on_progress(self) -> None:
        if self.changelog.incarnation_due is not None:
            self._due.wake()
        self._fold_loop.on_progress()


async def _close(client: Client) -> None:
    with anyio.move_on_after(CLOSE_S, shield=True):
        await client.close()
