"""`kvatlas publish --engine store`: publishes the blocks that a shared store holds, from all its writers.

Engines' publishers report the blocks that connectors wrote; each is held for its time to live after the last report. LMCache's
server reports its own blocks. The saved ledger includes each block's age. It is deleted when blocks are gone before their time,
and written again by the next save.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, time

import anyio
import msgpack
import zmq.asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import notices_to_store, writer_of
from kvatlas.errors import InvalidValue, WireError
from kvatlas.fleet.records import EngineKind
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engine_events import EngineBatch, EngineHash, EngineRemoved
from kvatlas_publishers.feed.continuity import Continuity
from kvatlas_publishers.feed.dead_letters import DeadLetters
from kvatlas_publishers.feed.lmcache_subscription import LMCacheSubscription
from kvatlas_publishers.feed.subscriber import Feed, FeedSettings
from kvatlas_publishers.ledger.connectors.connector_blocks import TICKS_TO_LIVE
from kvatlas_publishers.ledger.connectors.shared_store_notice import StoredInStore, decode
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.publisher import STORE_TTL_S, Publisher
from kvatlas_publishers.saved_state import SavedState, StateFile
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_publishers.shared_store.receiver import adapters_gone, events_of, objects_of

MOST_WRITERS = 1_024
"""Maximum number of writers whose block sizes are remembered."""
SAVE_EVERY_S = 60.0
CLEAR_LOOK_S = 1.0

log = logging.getLogger("kvatlas.publisher")


class SharedStore:
    """One store's publisher. It has the methods of `kvatlas_publishers.sidecar.EngineSidecar`."""

    def __init__(self, settings: PublishSettings) -> None:
        """Raises SettingsError for a state folder that can't be written."""
        self._settings = PublisherSettings.of(settings)
        self._process_settings = settings
        self.worker_id = self._settings.worker_id
        self._lmcache: LMCacheSubscription | None = None
        self._master: Feed | None = None
        self._state_file = StateFile.of(settings.state_dir, self.worker_id)
        self._told_bytes: dict[str, int] = {}
        """Bytes of a block in the store, by writer."""
        self._log = RateLimitedLog(log, f"store {self.worker_id}: ")

    def open(self, client: Client, context: zmq.asyncio.Context) -> None:
        """Load the saved state. Raises Unreachable if the master's endpoint can't be used."""
        ledger, incarnation = self._load()
        self._client, self._context = client, context
        self._publisher = publisher = Publisher(
            self._settings,
            nats=client,
            ledger=ledger,
            saved_incarnation=incarnation,
            begin=False,
            on_start_over=self._on_start_over,
        )
        self._lmcache = LMCacheSubscription.of(self._process_settings, publisher)
        if self._process_settings.mooncake_endpoint is not None:
            self._master = Feed(
                FeedSettings(EngineKind.STORE, self._process_settings.mooncake_endpoint),
                self.worker_id,
                Continuity(can_replay=False),
                publisher.counters,
                publisher.diagnoses,
                DeadLetters(None, self.worker_id),
                context,
                on_batch=self._on_master,
                on_empty=publisher.start_over,
            )
            self._master.open()

    def close(self) -> None:
        if self._master is not None:
            self._master.close()
            self._master = None

    async def run(self, ready: Callable[[Publisher], None]) -> None:
        """Publish until cancelled. Call `open` first."""
        publisher = self._publisher
        async with publisher:
            publisher.begin_publishing()
            subscription = await self._client.subscribe(notices_to_store(self.worker_id), cb=self._on_notice)
            with suppress(NatsError, TimeoutError):  # after a reconnect, the client subscribes again
                await self._client.flush()
            try:
                async with anyio.create_task_group() as tasks:
                    if self._lmcache is not None:
                        tasks.start_soon(self._lmcache.run, self._context)
                    if self._master is not None:
                        tasks.start_soon(self._master.run)
                    if self._state_file is not None:
                        tasks.start_soon(self._save_regularly, self._state_file)
                    ready(publisher)
                    await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    if self._client.is_connected:
                        await subscription.unsubscribe()
                await publisher.close_gently()
                if self._state_file is not None:
                    self._save(self._state_file)

    # ---------------------------------------------------------------- notices

    async def _on_notice(self, message: Msg) -> None:
        publisher = self._publisher
        try:
            writer = writer_of(message.subject)
            notice = decode(message.data)
            ledger = publisher.ledger
            events = events_of(notice, ledger.settings, uses_keys=ledger.uses_keys)
        except (InvalidValue, WireError) as error:
            publisher.counters.store_notices_refused += 1
            who = message.subject.rpartition(".")[2]
            self._log.report(f"notice {who}", f"notice of worker {who:.64} refused: {error}")
            return
        publisher.counters.store_notices += 1
        if notice.block_bytes:
            self._tell_block_bytes(writer, notice.block_bytes)
        for adapter in adapters_gone(notice):
            publisher.forget_adapter(adapter)
        if any(not isinstance(change, StoredInStore) for change in notice.changes):
            self._drop_saved(f"worker {writer} reported that blocks are gone")
        if events:
            publisher.record(EngineBatch(events))

    def _tell_block_bytes(self, writer: str, block_bytes: int) -> None:
        """Set the size to the one that most writers report. The store's own settings take precedence."""
        told = self._told_bytes
        if told.get(writer) == block_bytes or (writer not in told and len(told) >= MOST_WRITERS):
            return
        told[writer] = block_bytes
        ((usual, _),) = Counter(told.values()).most_common(1)
        self._publisher.ledger.set_told_block_bytes(usual)

    def _on_master(self, batch: EngineBatch) -> None:
        """Take a report from Mooncake's master: blocks that it stored and evicted for all writers."""
        publisher = self._publisher
        batch = objects_of(batch, publisher.ledger.settings)
        if any(isinstance(event, EngineRemoved) and event.hashes for event in batch.events):
            self._drop_saved("Mooncake's master reported that blocks are gone")
        publisher.record(batch)

    def _on_start_over(self) -> None:
        self._drop_saved("all known blocks were dropped")
        if self._lmcache is not None:
            self._lmcache.restart()

    # ---------------------------------------------------------------- saved state

    def _drop_saved(self, why: str) -> None:
        if self._state_file is None:
            return
        try:
            if self._state_file.discard():
                log.info("store %s: saved state deleted: %s", self.worker_id, why)
        except OSError as error:
            path = self._state_file.path
            log.warning("store %s: %s can't be deleted (%s), although %s", self.worker_id, path, error.strerror, why)

    async def _save_regularly(self, file: StateFile) -> None:
        counters = self._publisher.ledger.counters
        saved_at, cleared = monotonic(), 0  # counters start at 0 with the process, so earlier clears are noticed too
        while True:
            await anyio.sleep(CLEAR_LOOK_S)
            if counters.cleared_events != cleared:
                cleared = counters.cleared_events
                self._drop_saved("it was cleared")
            if monotonic() - saved_at >= SAVE_EVERY_S:
                saved_at = monotonic()
                self._save(file)

    def _save(self, file: StateFile) -> None:
        publisher = self._publisher
        publisher.settle()
        ages = [[int(tier), group, name, age] for tier, group, name, age in publisher.ledger.ages()]
        state = SavedState(
            worker_id=self.worker_id,
            incarnation=max(publisher.changelog.outbox.incarnation, publisher.changelog.saved_incarnation),
            continuity=msgpack.packb([time(), ages]),
            ledger=publisher.ledger.dump(),
        )
        file.try_save(state, publisher.counters)

    def _load(self) -> tuple[Ledger, int]:
        """The saved ledger, aged by the time that has passed since, and its incarnation; or an empty ledger."""
        saved = self._state_file.load() if self._state_file is not None else None
        if saved is None:
            return Ledger(self._settings.ledger), 0
        try:
            ledger = Ledger.load(saved.ledger, self._settings.ledger)
            saved_s, ages = _read_ages(saved.continuity)
        except InvalidValue as error:
            log.warning("store %s: saved state can't be used; starting empty: %s", self.worker_id, error)
            return Ledger(self._settings.ledger), saved.incarnation
        tick_s = (self._settings.store_ttl_s or STORE_TTL_S) / TICKS_TO_LIVE
        passed = max(0, -int(-(time() - saved_s) // tick_s))
        ledger.restore_ages({copy: age + passed for copy, age in ages.items()})
        return ledger, saved.incarnation


def _read_ages(packed: bytes) -> tuple[float, dict[tuple[Tier, int, EngineHash], int]]:
    """(time of the save in seconds since 1970, age of each block in ticks). Raises InvalidValue."""
    try:
        saved_s, ages = msgpack.unpackb(packed)
        return float(saved_s), {(Tier(tier), int(group), name): int(age) for tier, group, name, age in ages}
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidValue(f"ages of blocks: {error}") from error
