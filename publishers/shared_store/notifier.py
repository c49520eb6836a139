"""Sends an engine publisher's notices about a shared store to the store's publisher (thin; core NATS)."""

from collections import deque
from collections.abc import Sequence

from nats.errors import Error as NatsError

from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import shared_store_subject
from kvatlas.runtime.wakeup import Wakeup
from kvatlas_publishers.ledger.connectors.shared_store_notice import StoreChange, StoreCleared, encode
from kvatlas_publishers.parts import PublisherParts

EVERY_S = 5.0
"""Interval of notices without changes. From them, a store's publisher that has just started learns whether the writer uses
keys."""
LOOK_S = 0.5
MOST_WAITING = 1_024
"""Maximum number of notices that are kept while NATS is down. Beyond that, they are replaced by a single notice that
all blocks are gone."""


class StoreNotifier:
    """Notifies one store for one worker. Call `collect` after each fold, and `run` until cancelled."""

    def __init__(self, parts: PublisherParts, store_id: str) -> None:
        self._client = parts.client
        self._subject = shared_store_subject(store_id, parts.worker_id)
        self._counters = parts.counters
        self._ledger = parts.changelog.ledger
        self._wakeup = Wakeup()
        self._waiting: deque[bytes] = deque()

    def collect(self) -> None:
        """Take the ledger's changes to the store."""
        writes = self._ledger.store_writes
        changes = writes.take() if writes is not None else []
        if not changes or not self._encode(changes):  # while the size is not known, no block is known either
            return
        if len(self._waiting) > MOST_WAITING:
            self._counters.store_notices_lost += len(self._waiting)
            self._waiting.clear()
            self._encode([StoreCleared()])
        self._wakeup.wake()

    async def run(self) -> None:
        while True:
            await self._wakeup.wait(LOOK_S if self._waiting else EVERY_S)
            if not self._waiting:
                self._encode([])
            while self._waiting and self._client.is_connected:
                notice = self._waiting.popleft()
                try:
                    await self._client.publish(self._subject, notice)
                except NatsError:
                    self._counters.store_notices_lost += 1
                else:
                    self._counters.store_notices += 1

    def _encode(self, changes: Sequence[StoreChange]) -> bool:
        """Add the notices for these changes to those that are waiting. Returns False if the engine's block size is not
        known yet."""
        ledger = self._ledger
        if ledger.block_size is None:
            return False
        block_bytes = ledger.sizes.bytes_in(Tier.OBJECT_STORE)
        self._waiting.extend(encode(ledger.block_size, ledger.uses_keys, changes, block_bytes=block_bytes))
        return True
