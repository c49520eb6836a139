"""The publisher process: follows the feeds of one or more engine ranks and publishes their blocks."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import zmq.asyncio
from nats.aio.client import Client

from kvatlas.bus.connection import connect_nats
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.records import EngineKind, EngineState
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared
from kvatlas_publishers.feed.continuity import Continuity
from kvatlas_publishers.feed.dead_letters import DeadLetters
from kvatlas_publishers.feed.endpoints import endpoint_of_rank
from kvatlas_publishers.feed.lmcache_subscription import LMCacheSubscription
from kvatlas_publishers.feed.open_batches import OpenBatches
from kvatlas_publishers.feed.subscriber import Feed, FeedSettings
from kvatlas_publishers.fleet_check import FleetCheck
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.saved_state import SavedState, StateFile
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_publishers.sources.eventless_engine import EventlessEngine
from kvatlas_publishers.sources.open_engine import OpenEngine

if TYPE_CHECKING:
    from kvatlas_publishers.shared_store.process import SharedStore
    from kvatlas_publishers.sources.drained_engine import DrainedEngine

SAVE_EVERY_S = 60.0
SAVE_SHARE = 200
"""Packing the state may take at most 1/SAVE_SHARE of the time."""
CLOSE_S = 3.0
LOOK_S = 1.0
"""Interval of asking an engine whose feed has no connection whether its sockets have moved."""
_LIST_SOCKETS = (EngineKind.VLLM, EngineKind.MOCK, EngineKind.SGLANG)

log = logging.getLogger("kvatlas.publisher")


async def run_sidecar(
    settings: PublishSettings | Sequence[PublishSettings], ready: Callable[[Sequence[Publisher]], None] | None = None
) -> None:
    """Publish until cancelled. Several settings mean several engines or ranks, which all use the NATS of the first one.

    `ready` is called once every feed has caught up and every worker is published. On cancellation the sidecar saves the ledgers
    and reports the workers as draining in heartbeats. They are not retired, so that a restarted sidecar can continue.
    The status page of the first settings is served if its port is set. Raises Unreachable if NATS can't be reached and `wait`
    is off, or a socket can't be opened; OtherFleet if NATS belongs to another fleet; SettingsError for contradictory settings
    or an unusable address of the status page.
    """
    every = [settings] if isinstance(settings, PublishSettings) else list(settings)
    if not every:
        raise SettingsError("no engine to publish for; expected the settings of at least one")
    sidecars = [_sidecar(one) for one in every]
    names = [sidecar.worker_id for sidecar in sidecars]
    if len(set(names)) < len(names):
        raise SettingsError(f"worker ids {', '.join(names)}; expected each once")
    published: list[Publisher] = []

    def on_ready(publisher: Publisher) -> None:
        published.append(publisher)
        if ready is not None and len(published) == len(sidecars):
            ready(published)

    open_engines = {one.worker_id: one for one in sidecars if isinstance(one, OpenEngine)}

    async with _status_page(every[0], published, len(sidecars), open_engines):
        client = await connect_nats(
            every[0].nats,
            name=f"kvatlas-publisher-{names[0]}",
            wait=every[0].wait,
            on_wait=lambda line: log.warning("%s", line),
        )
        context = zmq.asyncio.Context()
        try:
            check = None
            if (fleet_id := every[0].fleet_id) is not None:
                check = FleetCheck(client, fleet_id, ", ".join(names), every[0].nats.name)
                await check.ask()
            for sidecar in sidecars:
                sidecar.open(client, context)
            async with anyio.create_task_group() as tasks:
                if check is not None:
                    tasks.start_soon(check.run)
                for sidecar in sidecars:
                    tasks.start_soon(sidecar.run, on_ready)
        finally:
            for sidecar in sidecars:
                sidecar.close()
            context.destroy(linger=0)
            with anyio.move_on_after(CLOSE_S, shield=True):
                await client.close()


@asynccontextmanager
async def _status_page(
    settings: PublishSettings, published: Sequence[Publisher], workers: int, open_engines: Mapping[str, OpenEngine]
) -> AsyncIterator[None]:
    """Serve the status page if a port is set. It starts before NATS has been reached, because a process that is waiting
    for NATS is alive."""
    if settings.status_port is None:
        yield
        return
    from kvatlas.http.server import listen, serve  # most sidecars on a machine serve no page
    from kvatlas_publishers.status import application

    listener = listen(settings.status_host, settings.status_port, "status page", settings.http)
    async with anyio.create_task_group() as tasks:
        await tasks.start(serve, application(published, workers, open_engines), listener)
        log.info("status page %s", listener.url)
        yield
        tasks.cancel_scope.cancel()


def _sidecar(
    settings: PublishSettings,
) -> "EngineSidecar | DrainedEngine | EventlessEngine | OpenEngine | SharedStore":
    if settings.engine is EngineKind.STORE:
        from kvatlas_publishers.shared_store.process import SharedStore  # its own process

        return SharedStore(settings)
    if not settings.events:
        return EventlessEngine(settings)
    if settings.engine is EngineKind.OPEN and settings.endpoint is None:
        return OpenEngine(settings)
    if settings.engine is not EngineKind.TENSORRT_LLM:
        return EngineSidecar(settings)
    from kvatlas_publishers.sources.drained_engine import DrainedEngine  # needs httpx: 6 MiB

    return DrainedEngine(settings)


class EngineSidecar:
    """One engine rank, with its feed, its publisher and its saved state."""

    def __init__(self, settings: PublishSettings) -> None:
        """Raises SettingsError if there is no endpoint, if a rank's endpoints have no port to add to, or if the state folder
        can't be written."""
        rank = settings.dp_rank
        self._settings = settings
        self._publisher_settings = PublisherSettings.of(settings)
        self.worker_id = self._publisher_settings.worker_id
        if settings.endpoint is None:
            raise SettingsError(f"worker {self.worker_id} has no event socket; name one, or switch events off")
        self._feed_settings = FeedSettings(
            engine=settings.engine,
            endpoint=endpoint_of_rank(settings.endpoint, rank),
            replay_endpoint=endpoint_of_rank(settings.replay_endpoint, rank) if settings.replay_endpoint else None,
            topic=settings.topic,
            rank=rank,
            bind=settings.bind,
            distrust_poison=settings.distrust_poison,
        )
        self._state_file = StateFile.of(settings.state_dir, self.worker_id)
        self._dead_letters = DeadLetters(settings.state_dir, self.worker_id)
        self._saved: SavedState | None = None
        self._feed: Feed | None = None
        self._lmcache: LMCacheSubscription | None = None

    def open(self, client: Client, context: zmq.asyncio.Context) -> None:
        """Load the saved state and open the feed. Raises Unreachable if its endpoint can't be used."""
        self._saved = self._load()
        ledger, continuity = self._restore(self._saved)
        self._publisher = publisher = Publisher(
            self._publisher_settings,
            nats=client,
            ledger=ledger,
            saved_incarnation=self._saved.incarnation if self._saved is not None else 0,
            begin=False,
            feed_alive=self._feed_alive,
            has_replay=self._feed_settings.replay_endpoint is not None,
            on_engine_restart=self._on_engine_restart,
            on_start_over=self._on_start_over,
        )
        self._lmcache = LMCacheSubscription.of(self._settings, publisher)
        self._context = context
        batches = OpenBatches(publisher) if self._feed_settings.engine is EngineKind.OPEN else None

        def start_over() -> None:
            publisher.start_over()
            if batches is not None:
                batches.forget()

        feed = Feed(
            self._feed_settings,
            self.worker_id,
            continuity,
            publisher.counters,
            publisher.diagnoses,
            self._dead_letters,
            context,
            on_batch=self._record if batches is None else batches.record,
            on_empty=start_over,
            on_alive=publisher.beat,
            engine_up=lambda: (
                None if publisher.engine.poller is None else publisher.engine.poller.state is EngineState.UP
            ),
        )
        feed.open()
        self._feed = feed

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    async def run(self, ready: Callable[[Publisher], None]) -> None:
        """Publish until cancelled. Call `open` first."""
        publisher, feed = self._publisher, self._feed
        assert feed is not None
        if publisher.engine.poller is not None:
            await publisher.engine.poller.poll_once()
            self._check_process(publisher, feed)
        async with publisher:
            await feed.catch_up()
            self._drop_what_is_gone(publisher)
            publisher.begin_publishing()
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(feed.run)
                    if self._settings.engine_url is not None and self._settings.engine in _LIST_SOCKETS:
                        tasks.start_soon(self._follow_sockets, publisher, feed, self._settings.engine_url)
                    if self._lmcache is not None:
                        tasks.start_soon(self._lmcache.run, self._context)
                    if self._state_file is not None:
                        tasks.start_soon(self._save_regularly, publisher, feed, self._state_file)
                    ready(publisher)
            finally:
                await publisher.close_gently()
                if self._state_file is not None:
                    self._state_file.try_save(self._state(publisher, feed), publisher.counters)

    async def _follow_sockets(self, publisher: Publisher, feed: Feed, url: str) -> None:
        """Follow an engine whose port is chosen by its operating system: after a restart, it lists a new port."""
        from kvatlas_publishers.engines.discovery import listed_source  # needs httpx: 6 MiB

        while True:
            await anyio.sleep(LOOK_S)
            if feed.is_away and publisher.engine.poller is not None and publisher.engine.state is EngineState.UP:
                listed = await listed_source(url, self._feed_settings.rank, self._settings.engine)
                if listed is not None:
                    feed.move(listed.endpoint, listed.replay_endpoint)

    def _record(self, batch: EngineBatch) -> None:
        self._publisher.record(batch)
        if self._lmcache is not None and any(isinstance(event, EngineCleared) for event in batch.events):
            self._lmcache.restart()  # LMCache's server still has the chunks: the engine's clear does not empty it

    def _feed_alive(self) -> bool:
        return self._feed is not None and self._feed.alive

    def _on_start_over(self) -> None:
        if self._lmcache is not None:
            self._lmcache.restart()

    def _on_engine_restart(self) -> None:
        if self._feed is not None:
            self._feed.record_restart()

    # ---------------------------------------------------------------- saved state

    def _load(self) -> SavedState | None:
        if self._state_file is None:
            return None
        saved = self._state_file.load()
        if saved is None:
            log.info("worker %s: %s", self.worker_id, self._state_file.warning)
        return saved

    def _restore(self, saved: SavedState | None) -> tuple[Ledger, Continuity]:
        """The saved ledger and feed position, or empty ones."""
        can_replay = self._feed_settings.replay_endpoint is not None
        if saved is not None:
            try:
                continuity = Continuity.load(saved.continuity, can_replay=can_replay)
                return Ledger.load(saved.ledger, self._publisher_settings.ledger), continuity
            except InvalidValue as error:
                log.warning("worker %s: saved state can't be used; starting empty: %s", self.worker_id, error)
        return Ledger(self._publisher_settings.ledger), Continuity(can_replay=can_replay)

    def _check_process(self, publisher: Publisher, feed: Feed) -> None:
        """Start empty if the engine's process was replaced since the state was saved."""
        start_s = publisher.engine.poller.process_start_s if publisher.engine.poller is not None else None
        if self._saved is None or not self._saved.started_us or start_s is None:
            return
        if _us(start_s) != self._saved.started_us:
            log.warning("worker %s: engine restarted since the state was saved; starting empty", self.worker_id)
            publisher.ledger.empty()
            feed.continuity.forget()
            self._saved = None

    def _drop_what_is_gone(self, publisher: Publisher) -> None:
        """Drop blocks whose loss the feed does not report: those computed with weights or adapters that changed while no
        publisher ran, and those that a sleeping engine had in HBM."""
        if (poller := publisher.engine.poller) is None:
            return
        if poller.state is EngineState.ASLEEP:
            publisher.record(EngineBatch([EngineCleared()]))
        if self._saved is not None:
            poller.compare(self._saved.weight_version, self._saved.adapter_roots)

    async def _save_regularly(self, publisher: Publisher, feed: Feed, file: StateFile) -> None:
        pause_s, saved_at = SAVE_EVERY_S, 0
        while True:
            await anyio.sleep(pause_s)
            if feed.consistent and (batches := publisher.counters.engine_batches) != saved_at:
                started_s = monotonic()
                state = self._state(publisher, feed)
                # packing a million blocks takes a second, so larger ledgers are saved less often
                pause_s = max(SAVE_EVERY_S, SAVE_SHARE * (monotonic() - started_s))
                if await anyio.to_thread.run_sync(file.try_save, state, publisher.counters):
                    saved_at = batches

    def _state(self, publisher: Publisher, feed: Feed) -> SavedState:
        """The ledger, with the matching position in the feed."""
        publisher.settle()
        poller = publisher.engine.poller
        return SavedState(
            worker_id=self.worker_id,
            incarnation=max(publisher.changelog.outbox.incarnation, publisher.changelog.saved_incarnation),
            continuity=feed.continuity.dump(),
            ledger=publisher.ledger.dump(),
            started_us=_us(poller.process_start_s) if poller is not None and poller.process_start_s else 0,
            weight_version=poller.weight_version if poller is not None else "",
            adapter_roots=poller.adapter_roots if poller is not None else {},
        )


def _us(seconds: float) -> int:
    return int(seconds * 1_000_000)
