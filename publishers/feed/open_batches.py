"""Passes batches of the open event forms from their receiver to the publisher.

The forms number events, name their engine, report loads and announce the engine's shutdown. This module applies them in the
same way for all receivers (ZMQ, standard input, HTTP, the embedded API):

    another engine's batch     ignored and diagnosed; unless the settings name the engine, the first one seen is the worker's
    another model's batch      its stored blocks are left out, and it is diagnosed
    event in order             taken
    event seen before          a duplicate: ignored
    event ahead, or going back a gap or a restart: all known blocks are dropped, then the event is taken. This costs the index a
                               new incarnation, so it is rationed: a source that keeps doing it is ignored for a while
    shutdown                   the worker drains until its engine starts again
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import Any

from kvatlas.blocks.external_chain import MAX_HASH
from kvatlas.errors import InvalidValue
from kvatlas.fleet.reported_load import read_load
from kvatlas.identity import EXTERNAL_PREFIX, OWN_CHAIN
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_publishers.engine_events import EngineBatch, EngineEvent, EngineStored, OpenHeader
from kvatlas_publishers.engines.open_events import batch_of, decode_batch
from kvatlas_publishers.feed.continuity import Continuity
from kvatlas_publishers.feed.undecodable import STARTING_OVER, Distrust
from kvatlas_publishers.publisher import Publisher

log = logging.getLogger("kvatlas.publisher")


class OpenBatches:
    """Takes all batches of one publisher whose engine kind is `open`, in order."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._settings = publisher.settings
        self._log = RateLimitedLog(log, f"worker {publisher.worker_id}: ")
        self._continuity = Continuity(can_replay=False, max_seq=MAX_HASH)
        self._engine_id = self._settings.engine_id
        self._distrust = Distrust()
        self._left_out = 0
        self._ignored: list[str] = []

    def take(self, told: bytes | dict[str, Any]) -> EngineBatch:
        """Record a batch of either form, as bytes (JSON or msgpack) or as a decoded object. Returns the batch; its `skipped`
        lists what was unreadable or ignored. Raises EngineEventError if it is not a batch."""
        batch = decode_batch(told) if isinstance(told, bytes) else batch_of(told)
        if batch.has_lost(distrust_unknown=True):
            self._publisher.counters.feed_lost += 1
        return replace(batch, skipped=[*batch.skipped, *self.record(batch)])

    def forget(self) -> None:
        """Forget the source's state: it starts again, perhaps as another engine process, and its numbers may start anywhere."""
        self._continuity.forget()
        self._engine_id = self._settings.engine_id
        self._publisher.undrain()

    def record(self, batch: EngineBatch) -> Sequence[str]:
        """Record a decoded batch. Returns one line for each part that was ignored, with the reason."""
        self._ignored = []
        header = batch.header or OpenHeader()
        if not self._is_own_engine(header):
            self._publisher.counters.feed_unheard += 1
            return self._ignored
        if header.load is not None:
            self._record_load(header.load, batch.ts)
        events = self._in_order(header.event_ids, batch.events) if header.event_ids else batch.events
        if not self._is_own_model(header):
            events = [event for event in events if not isinstance(event, EngineStored)]
        self._publisher.record(replace(batch, events=[one for event in events for one in self._completed(event)]))
        self._report_unknown_parents()
        if header.shutdown:
            self._publisher.drain()
        return self._ignored

    def _is_own_engine(self, header: OpenHeader) -> bool:
        if header.engine_id is None or header.engine_id == self._engine_id:
            return True
        if self._engine_id is None:
            self._engine_id = header.engine_id
            return True
        seen = f"batches of engine {header.engine_id} are ignored: the worker is engine {self._engine_id}"
        self._report_ignored("engine_id", seen, "run a publisher for each engine, or set --engine-id")
        return False

    def _is_own_model(self, header: OpenHeader) -> bool:
        own = self._settings.model_id, self._settings.tokenizer_id or self._settings.model_id
        told = header.model_id or own[0], header.tokenizer_id or own[1]
        if told == own:
            return True
        seen = f"blocks of model {told[0]} with tokenizer {told[1]} are left out: the worker has another model"
        self._report_ignored("model", seen, "run a publisher with that --model-id and --tokenizer-id")
        return False

    def _report_ignored(self, key: str, seen: str, cure: str) -> None:
        self._publisher.diagnoses.set(key, seen, cure)
        if seen not in self._ignored:
            self._ignored.append(seen)

    def _report_unknown_parents(self) -> None:
        left_out = self._publisher.ledger.counters.unknown_parent
        if left_out > self._left_out:
            why = "their parent block is unknown; for a session's first block, name the session in session_id"
            self._log.report("parents", f"{left_out - self._left_out} blocks left out: {why}", logging.INFO)
        self._left_out = left_out

    # ---------------------------------------------------------------- events

    def _in_order(self, event_ids: Sequence[tuple[int, bytes]], events: Sequence[EngineEvent]) -> Sequence[EngineEvent]:
        """The events to record. Drops all known blocks before an event that is out of order."""
        counted, taken, now_s = self._continuity.counters, list[EngineEvent](), monotonic()
        for (event_id, told), event in zip(event_ids, events, strict=True):
            restarts, last_id = counted.restarts, self._continuity.last_seq
            step = self._continuity.offer(event_id, told)
            if step.empty:
                taken.clear()
                if self._distrust.record_loss(now_s):
                    self._log.report("lost", f"event_id {event_id} came after {last_id}; {STARTING_OVER}")
                    self._publisher.start_over()
            if counted.restarts > restarts:
                self._publisher.undrain()
            if step.take:
                taken.append(event)
        counters = self._publisher.counters
        counters.event_gaps, counters.event_restarts = counted.gaps, counted.restarts
        counters.event_duplicates = counted.duplicates
        if self._distrust.is_trusted(now_s):
            return taken
        counters.feed_unheard += 1
        self._ignored.append("events are ignored for a while: too many were out of order")
        return ()

    def _completed(self, event: EngineEvent) -> Sequence[EngineEvent]:
        """The event, completed from the settings; nothing if a required setting is missing."""
        if not isinstance(event, EngineStored) or event.local_hashes is None:
            return (event,)
        if event.chain != OWN_CHAIN:
            local = replace(event.local_hashes, chain=f"{EXTERNAL_PREFIX}{self._settings.hash_chain}")
            return (replace(event, local_hashes=local),)
        if self._settings.block_size is None:
            seen = "events of the router protocol have no block size: their blocks are left out"
            self._report_ignored("block_size_untold", seen, "set --block-size to the engine's")
            return ()
        return (replace(event, block_size=self._settings.block_size),)

    def _record_load(self, load: Mapping[str, Any], ts_s: float) -> None:
        counters, now_s = self._publisher.counters, time()
        sampled_us = int(min(ts_s or now_s, now_s) * 1e6)
        try:
            state = read_load(load, self._publisher.worker_id, sampled_us, self._settings.locality_domain)
        except InvalidValue as error:
            counters.load_failures += 1
            self._ignored.append(f"load ignored: {error}")
            self._log.report("load", self._ignored[-1])
            return
        counters.load_samples += 1
        self._publisher.engine.reported_load = state
