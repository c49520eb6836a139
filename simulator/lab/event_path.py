"""The path of one engine's events into the index, in virtual time: the publisher's ledger, outbox and wire codec, then the
memory index behind its fence.

A message may be late or lost. After a loss the index waits for messages that never come, as after a lost stream. It
requests a snapshot when the gap is DOUBT_US old, and the publisher begins a new incarnation.
"""

import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.ledger.settings import LedgerSettings
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from kvatlas_publishers.stream.checkpoints import CheckpointSettings
from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored, KVEvent, Medium
from kvatlas_simulator.hybrid_cache.groups import CacheGroup
from kvatlas_simulator.lab.cache_layout import CACHE_BLOCK, CacheLayout
from kvatlas_simulator.lab.requests import MODEL

T = TypeVar("T")

DOUBT_US = 2_000_000
_TIER_OF = {Medium.GPU: Tier.HBM, Medium.CPU: Tier.CPU_DRAM}


def finish(call: Coroutine[Any, Any, T]) -> T:
    """Run a call that never waits, because everything in the lab is in this process; return its result."""
    while True:
        try:
            call.send(None)
        except StopIteration as done:
            result: T = done.value
            return result


class EventPath:
    """The path of one worker. `at(when_us, action)` runs an action at a virtual time; `layout`: the scaled layout of the
    worker's cache; `delay_us`: the delay from an engine's step to the index."""

    def __init__(
        self,
        worker_id: str,
        index: MemoryIndex,
        at: Callable[[float, Callable[[], None]], None],
        rng: random.Random,
        layout: CacheLayout,
        *,
        delay_us: float,
        loss: float,
    ) -> None:
        self.lost = self.snapshots = 0
        self._worker_id = worker_id
        self._index = index
        self._partition = partition_of(worker_id, index.partitions)
        self._at = at
        self._rng = rng
        self._delay_us = delay_us
        self._loss = loss
        self._now_us = 0.0
        self._doubted = False
        self._groups = layout.groups
        ledger = Ledger(
            LedgerSettings(MODEL, MODEL, block_size=CACHE_BLOCK, salt_is_tenant=True, chunk_tokens=layout.chunk_tokens)
        )
        self._changelog = Changelog(
            worker_id, ledger, PublisherCounters(), checkpoints=CheckpointSettings(), rng=random.Random(rng.random())
        )
        self._changelog.require_incarnation(IncarnationReason.START)
        self._begin_incarnation(0.0, certain=True)

    def publish(self, events: Sequence[KVEvent], now_us: float) -> None:
        """Publish one engine batch."""
        changelog = self._changelog
        changelog.record(EngineBatch([to_engine_event(event, self._groups) for event in events]))
        changelog.publish(changelog.fold(), round(now_us), now_us / 1e6)
        if changelog.incarnation_due is None:
            self._send(now_us)
        else:  # the engine's groups have become known, or the outbox was full
            self._begin_incarnation(now_us)

    def _send(self, now_us: float, *, certain: bool = False) -> None:
        """Send the content of the outbox; the stream has it at once."""
        outbox, payloads = self._changelog.outbox, []
        while (sent := outbox.take()) is not None:
            outbox.acknowledge(sent.round, sent.seq, sent.seq + 1)
            if not certain and self._loss and self._rng.random() < self._loss:
                self.lost += 1
            else:
                payloads.append(sent.payload)
        if payloads:
            self._at(now_us + self._delay_us, lambda: self._apply(payloads, now_us + self._delay_us))

    def _apply(self, payloads: Sequence[bytes], now_us: float) -> None:
        messages = [wire.decode_raw(payload) for payload in payloads]
        finish(self._index.apply(0, [PartitionBatch(self._partition, messages)]))
        if self._loss and not self._doubted:
            record = finish(self._index.record(self._worker_id))
            if record is not None and record.want > (record.incarnation, record.seq):
                self._doubted = True
                self._at(now_us + DOUBT_US, lambda: self._repair(now_us + DOUBT_US))

    def _repair(self, now_us: float) -> None:
        self._doubted = False
        record = finish(self._index.record(self._worker_id))
        if record is None or record.want <= (record.incarnation, record.seq):
            return  # a snapshot that was on its way has already repaired it
        if self._changelog.request_snapshot(record.want[0]):
            self._begin_incarnation(now_us)

    def _begin_incarnation(self, now_us: float, *, certain: bool = False) -> None:
        self.snapshots += 1
        incarnation = self._changelog.next_incarnation(round(now_us))
        self._changelog.begin_incarnation(incarnation, round(now_us))
        self._send(now_us, certain=certain)


def to_engine_event(event: KVEvent, groups: Sequence[CacheGroup], block_tokens: int = CACHE_BLOCK) -> EngineEvent:
    """The event as an engine with these groups and this block size would send it. In blocks of more than two tokens,
    the content's id is repeated."""
    if isinstance(event, BlocksStored):
        token_ids: Sequence[int] = event.token_ids
        if block_tokens != CACHE_BLOCK:
            token_ids = [content for content in token_ids[::CACHE_BLOCK] for _ in range(block_tokens)]
        return EngineStored(
            hashes=event.block_hashes,
            parent=event.parent_hash,
            token_ids=token_ids,
            block_size=block_tokens,
            tier=_TIER_OF[event.medium],
            adapter=event.adapter,
            salt=event.salt,
            group=event.group,
            kind=groups[event.group].kind,
            window_tokens=groups[event.group].window_tokens,
        )
    if isinstance(event, BlockRemoved):
        return EngineRemoved((event.block_hash,), _TIER_OF[event.medium], event.group)
    return EngineCleared((Tier.HBM,))
