"""The publisher as a process: follows the feeds of one or several engine ranks and tells the index what they hold."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import anyio
import anyio.to_thread
import zmq.asyncio
from nats.aio.client import Client

from kvatlas.bus.connection import connect_nats
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.records import EngineState
from kvatlas.settings import PublishSettings
from publishers.eventless_engine import SilentEngine
from publishers.feed.continuity import Continuity
from publishers.feed.dead_letters import DeadLetters
from publishers.feed.endpoints import of_rank
from publishers.feed.subscriber import Feed, FeedSettings
from publishers.ledger.ledger import Ledger
from publishers.publisher import Publisher
from publishers.saved_state import SavedState, StateFile
from publishers.settings import PublisherSettings

SAVE_EVERY_S = 60.0
SAVE_SHARE = 200
CLOSE_S = 3.0

log = logging.getLogger("kvatlas.publisher")


async def run_sidecar(
    settings: PublishSettings | Sequence[PublishSettings], ready: Callable[[Sequence[Publisher]], None] | None = None
) -> None:
    """Publish until cancelled; several settings are several engines or ranks, over the first one's NATS.

    `ready` is called once every feed was caught up with and every worker tells. Cancelled, it saves the ledgers and tells
    routers that the workers are draining; they are not retired, so that a restarted sidecar goes on from there.
    Raises Unreachable where NATS can't be reached and `wait` is off, or a socket can't be opened, and SettingsError for
    settings that contradict each other.
    """
    every = [settings] if isinstance(settings, PublishSettings) else list(settings)
    if not every:
        raise SettingsError("no engine to publish for; expected the settings of at least one")
    sidecars = [EngineSidecar(one) if one.events else SilentEngine(one) for one in every]
    names = [sidecar.worker_id for sidecar in sidecars]
    if len(set(names)) < len(names):
        raise SettingsError(f"worker ids {', '.join(names)}; expected each once")
    client = await connect_nats(
        every[0].nats_url,
        name=f"kvatlas-publisher-{names[0]}",
        wait=every[0].wait,
        on_wait=lambda line: log.warning("%s", line),
    )
    context = zmq.asyncio.Context()
    try:
        for sidecar in sidecars:
            sidecar.open(client, context)
        telling: list[Publisher] = []

        def one_ready(publisher: Publisher) -> None:
            telling.append(publisher)
            if ready is not None and len(telling) == len(sidecars):
                ready(telling)

        async with anyio.create_task_group() as tasks:
            for sidecar in sidecars:
                tasks.start_soon(sidecar.run, one_ready)
    finally:
        for sidecar in sidecars:
            sidecar.close()
        context.destroy(linger=0)
        with anyio.move_on_after(CLOSE_S, shield=True):
            await client.close()


class EngineSidecar:
    """One engine rank: its feed, its publisher, its saved state."""

    def __init__(self, settings: PublishSettings) -> None:
        """Raises SettingsError without an endpoint, or where endpoints have no port to count up."""
        rank = settings.dp_rank
        self._publisher_settings = PublisherSettings.of(settings)
        self.worker_id = self._publisher_settings.worker_id
        if settings.endpoint is None:
            raise SettingsError(f"worker {self.worker_id} has no event socket; expected one, or events off")
        self._feed_settings = FeedSettings(
            engine=settings.engine,
            endpoint=of_rank(settings.endpoint, rank),
            replay_endpoint=of_rank(settings.replay_endpoint, rank) if settings.replay_endpoint else None,
            topic=settings.topic,
            bind=settings.bind,
            distrust_poison=settings.distrust_poison,
        )
        self._state_file = StateFile(settings.state_dir, self.worker_id) if settings.state_dir else None
        letters = settings.state_dir / f"{self.worker_id}.dead-letters.jsonl" if settings.state_dir else None
        self._dead_letters = DeadLetters(letters, self.worker_id)
        self._saved_at = 0
        self._saved: SavedState | None = None
        self._feed: Feed | None = None

    def open(self, client: Client, context: zmq.asyncio.Context) -> None:
        """Load what was saved and open the feed. Raises Unreachable where its endpoint can't be used."""
        self._saved = self._load()
        ledger, continuity = self._restored(self._saved)
        self._publisher = publisher = Publisher(
            self._publisher_settings,
            nats=client,
            ledger=ledger,
            saved_incarnation=self._saved.incarnation if self._saved is not None else 0,
            begin=False,
        )
        feed = Feed(
            self._feed_settings,
            self.worker_id,
            continuity,
            publisher.counters,
            self._dead_letters,
            context,
            on_batch=publisher.take,
            on_empty=publisher.start_over,
            on_alive=publisher.beat,
        )
        feed.open()
        self._feed = feed
        if publisher.poller is None:
            publisher.feed_alive = lambda: feed.alive

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    async def run(self, ready: Callable[[Publisher], None]) -> None:
        """Publish until cancelled; after `open`."""
        publisher, feed = self._publisher, self._feed
        assert feed is not None
        if publisher.poller is not None:
            await publisher.poller.poll_once()
            self._check_life(publisher, feed)
            publisher.poller.on_restart = feed.restarted
            feed.engine_up = lambda: publisher.engine_state is EngineState.UP
        async with publisher:
            await feed.catch_up()
            publisher.begin_telling()
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(feed.run)
                    if self._state_file is not None:
                        tasks.start_soon(self._keep_saving, publisher, feed)
                    ready(publisher)
            finally:
                await publisher.close_gently()
                self._save(publisher, feed)

    # ---------------------------------------------------------------- saved state

    def _load(self) -> SavedState | None:
        if self._state_file is None:
            return None
        saved = self._state_file.load()
        if saved is None:
            log.info("worker %s: %s", self.worker_id, self._state_file.warning)
        return saved

    def _restored(self, saved: SavedState | None) -> tuple[Ledger, Continuity]:
        """The saved ledger and position, or empty ones."""
        can_replay = self._feed_settings.replay_endpoint is not None
        if saved is not None:
            try:
                continuity = Continuity.load(saved.continuity, can_replay=can_replay)
                return Ledger.load(saved.ledger, self._publisher_settings.ledger), continuity
            except InvalidValue as error:
                log.warning("worker %s: saved state not used, starting empty: %s", self.worker_id, error)
        return Ledger(self._publisher_settings.ledger), Continuity(can_replay=can_replay)

    def _check_life(self, publisher: Publisher, feed: Feed) -> None:
        """The engine's process may be another one than when the state was saved."""
        now_s = publisher.poller.process_start_s if publisher.poller is not None else None
        if self._saved is None or not self._saved.started_us or now_s is None or _us(now_s) == self._saved.started_us:
            return
        log.warning("worker %s: the engine's process started anew since the state was saved", self.worker_id)
        publisher.ledger.empty()
        feed.continuity = Continuity(can_replay=feed.continuity.can_replay)

    async def _keep_saving(self, publisher: Publisher, feed: Feed) -> None:
        pause_s = SAVE_EVERY_S
        while True:
            await anyio.sleep(pause_s)
            if feed.settled and publisher.counters.engine_batches != self._saved_at:
                started_s = monotonic()
                state = self._state(publisher, feed)
                # a million blocks take a second to pack: the larger the ledger, the rarer
                pause_s = max(SAVE_EVERY_S, SAVE_SHARE * (monotonic() - started_s))
                with self._saving(publisher) as file:
                    await anyio.to_thread.run_sync(file.save, state)

    def _save(self, publisher: Publisher, feed: Feed) -> None:
        """Save at the end."""
        if self._state_file is not None:
            with self._saving(publisher) as file:
                file.save(self._state(publisher, feed))

    @contextmanager
    def _saving(self, publisher: Publisher) -> Iterator[StateFile]:
        """An error is counted and logged: publishing goes on."""
        assert self._state_file is not None
        batches = publisher.counters.engine_batches
        try:
            yield self._state_file
        except OSError as error:
            publisher.counters.saves_failed += 1
            log.warning("worker %s: state not saved to %s: %s", self.worker_id, self._state_file.path, error.strerror)
        else:
            publisher.counters.saves += 1
            self._saved_at = batches

    def _state(self, publisher: Publisher, feed: Feed) -> SavedState:
        """The ledger with the position in the feed that it belongs to."""
        publisher.settle()
        poller = publisher.poller
        return SavedState(
            worker_id=self.worker_id,
            incarnation=max(publisher.telling.outbox.incarnation, publisher.telling.saved_incarnation),
            continuity=feed.continuity.dump(),
            ledger=publisher.ledger.dump(),
            started_us=_us(poller.process_start_s) if poller is not None and poller.process_start_s else 0,
        )


def _us(seconds: float) -> int:
    return int(seconds * 1_000_000)
