"""Reads KV events over HTTP from an engine that returns each event only once (TensorRT-LLM's trtllm-serve).

    POST /kv_cache_events   an array of records, immediately or after up to two seconds without any (1.3.0rc9 and before)

There is no replay: events in a lost answer, or taken by another reader, are gone. Since `event_id` has no gaps, such a loss
is noticed:

    next in order         take
    anything else         start over: drop all known blocks, and continue from this record
    no answer             start over: returned events may be lost, or the engine was restarted

Dropping all known blocks is safe; keeping a block whose removal was lost is not. Each drop costs the index a new incarnation,
so drops are rationed, as for undecodable payloads: two readers of one engine take each other's events all the time.
"""

import logging
from collections.abc import Callable, Sequence
from time import monotonic

import anyio
import httpx

from kvatlas.engine_access import NO_KEY, EngineAccess
from kvatlas.errors import EngineEventError
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.engine_events import EngineBatch, EngineEvent
from kvatlas_publishers.engines.http_client import engine_http
from kvatlas_publishers.engines.tensorrt_llm import HASH_ALGORITHM, MAX_BODY_BYTES, EventDecoder, Record, read_records
from kvatlas_publishers.feed.dead_letters import DeadLetters
from kvatlas_publishers.feed.undecodable import STARTING_OVER, Distrust

PATH = "/kv_cache_events"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.05
"""The pause after an answer with records, and the longest pause. After each empty answer, the pause grows by half."""
RETRY_S = 0.5
_STREAMS = ("event-stream", "ndjson", "jsonl")
_ARRAY = "expected one JSON array, as from trtllm-serve's /kv_cache_events: streamed events are not supported"
ANSWER_S = 30.0
"""Time limit for an answer. An engine may wait two seconds for events, and a busy engine answers late."""
SUSPICIOUS_GAPS = 3
"""From this many gaps on, another reader is the likely cause."""
FOREIGN_RUNS = 8
"""The hash algorithm is diagnosed once this many stored runs don't match their tokens and none do."""

log = logging.getLogger("kvatlas.publisher")


class DrainPosition:
    """The number of the last record (pure)."""

    def __init__(self) -> None:
        self.last_id: int | None = None
        self.gaps = 0
        self.restarts = 0

    def take(self, event_id: int) -> str:
        """Move to this record. Returns why the held blocks are no longer certain; empty if they are."""
        last, self.last_id = self.last_id, event_id
        if last is None or event_id == last + 1:
            return ""
        if event_id > last:
            self.gaps += 1
            return f"event {last} is followed by {event_id}: events in between went to another reader, or were dropped"
        self.restarts += 1
        return f"engine restarted: event {last} is followed by {event_id}"


class EventDrain:
    """The only reader of one engine's events. Passes them to `on_batch`; calls `on_empty` to drop all known blocks."""

    def __init__(
        self,
        url: str,
        worker_id: str,
        counters: PublisherCounters,
        diagnoses: Diagnoses,
        dead_letters: DeadLetters,
        *,
        on_batch: Callable[[EngineBatch], object],
        on_empty: Callable[[], None],
        access: EngineAccess = NO_KEY,
    ) -> None:
        self._access = access
        self.url = url.rstrip("/") + PATH
        self._worker_id = worker_id
        self._counters = counters
        self._diagnoses = diagnoses
        self._dead_letters = dead_letters
        self._on_batch = on_batch
        self._on_empty = on_empty
        self._log = RateLimitedLog(log, f"worker {worker_id}: ")
        self._position = DrainPosition()
        self._decoder = EventDecoder()
        self._distrust = Distrust()
        self._connected = False
        self._has_ranks = False

    async def run(self) -> None:
        """Read until cancelled."""
        pause_s = FIRST_PAUSE_S
        # one request at a time: two would split the records between them
        async with engine_http(self.url, self._worker_id, self._access, ANSWER_S) as client:
            while True:
                taken = await self._read(client)
                pause_s = RETRY_S if taken is None else FIRST_PAUSE_S if taken else min(LONGEST_PAUSE_S, pause_s * 1.5)
                await anyio.sleep(pause_s)

    async def _read(self, client: httpx.AsyncClient) -> int | None:
        """Read once. Returns the number of records received; None if there was no answer."""
        body = bytearray()
        try:
            with anyio.fail_after(ANSWER_S):
                async with client.stream("POST", self.url) as answer:
                    kind = answer.headers.get("content-type", "")
                    if any(one in kind for one in _STREAMS):
                        raise EngineEventError(f"answers with a stream ({kind:.40}); {_ARRAY}")
                    async for part in answer.aiter_bytes():
                        body += part
                        if answer.status_code == 200 and (begins := bytes(body.lstrip()[:1])) not in (b"", b"["):
                            raise EngineEventError(f"answer begins with {begins.decode(errors='replace')!r}; {_ARRAY}")
                        if len(body) > MAX_BODY_BYTES:
                            raise EngineEventError(f"response exceeds {MAX_BODY_BYTES} bytes")
            if answer.status_code != 200:
                raise EngineEventError(
                    f"answer {answer.status_code} {bytes(body[:80]).decode(errors='replace')}".rstrip()
                )
            records = read_records(bytes(body))
        except TimeoutError:
            if not body:
                self._record_failure(EngineEventError(f"no answer in {ANSWER_S:g} s"), b"")
            else:
                self._record_failure(
                    EngineEventError(f"answer did not end within {ANSWER_S:g} s; {_ARRAY}"), bytes(body)
                )
            return None
        except (httpx.HTTPError, EngineEventError) as error:
            self._record_failure(error, bytes(body))
            return None
        if not self._connected:
            self._connected = True
            self._diagnoses.clear("feed")
            log.info("worker %s: reading events from %s", self._worker_id, self.url)
        self._take(records)
        return len(records)

    def _record_failure(self, error: Exception, body: bytes) -> None:
        why = str(error) or type(error).__name__
        if isinstance(error, EngineEventError):
            self._counters.poison += 1
            if not self._dead_letters.keep(why, None, body):
                self._counters.dead_letters_dropped += 1
            self._diagnoses.set(
                "feed",
                f"POST {self.url}: {why}",
                "start trtllm-serve with kv_cache_config event_buffer_max_size above 0 and enable_block_reuse, and set "
                "--engine-url to it",
            )
        if self._connected or self._position.last_id is not None:
            self._connected = False
            self._position.last_id = None
            self._start_over(f"POST {self.url}: {why}", forget=True)

    def _take(self, records: Sequence[Record]) -> None:
        """Pass on the records' events, in one batch up to each point at which all known blocks are dropped."""
        events: list[EngineEvent] = []
        skipped: list[str] = []
        for record in records:
            why = self._position.take(record.event_id)
            if record.rank and not self._has_ranks:
                self._has_ranks = True
                seen = f"{self.url} has events of several attention ranks, which requests can't choose: publishing no blocks"
                self._diagnoses.set("rank", seen, "start the engine without enable_attention_dp")
                self._on_empty()
            if why:
                events, skipped = self._pass_on(events, skipped)
                self._start_over(why, forget=self._position.last_id == 0)
            try:
                events += self._decoder.decode(record)
            except EngineEventError as error:
                skipped.append(str(error))
                if record.kind != "stored":
                    self._counters.feed_lost += 1
                    events, skipped = self._pass_on([], skipped)
                    self._start_over(f"event {record.event_id} can't be read and may have removed blocks", forget=False)
        self._pass_on(events, skipped)
        self._diagnose()

    def _pass_on(self, events: list[EngineEvent], skipped: list[str]) -> tuple[list[EngineEvent], list[str]]:
        """Pass a batch on. Returns two empty lists for the next one."""
        if self._has_ranks or not self._distrust.is_trusted(monotonic()):
            self._counters.feed_unheard += bool(events)
        elif events or skipped:
            self._on_batch(EngineBatch(events, skipped=skipped))
        return [], []

    def _start_over(self, why: str, *, forget: bool) -> None:
        """Drop all known blocks. `forget`: True if the engine's process may be a different one."""
        if forget:
            self._decoder.forget()
        self._counters.feed_gaps = self._position.gaps
        self._counters.feed_restarts = self._position.restarts
        if self._distrust.record_loss(monotonic()):
            self._counters.feed_started_over += 1
            self._log.report("lost", f"{why}; {STARTING_OVER}")
            self._on_empty()

    def _diagnose(self) -> None:
        if self._position.gaps >= SUSPICIOUS_GAPS:
            seen = f"events of {self.url} were missing {self._position.gaps} times"
            cure = (
                "stop other readers of that address (each event is returned only once), or raise event_buffer_max_size"
            )
            self._diagnoses.set("gaps", seen, cure)
        decoder = self._decoder
        if decoder.verified or decoder.foreign < FOREIGN_RUNS:
            self._diagnoses.clear("hashes")
        elif decoder.foreign_algorithm:
            theirs = decoder.foreign_algorithm
            seen = f"events arrive from {self.url}, but none of them is published: their block hashes are {theirs}"
            cure = f"set kv_cache_config's use_kv_cache_manager_v2 to false: its hashes are {HASH_ALGORITHM}"
            self._diagnoses.set("hashes", seen, cure)
        else:
            seen = f"block hashes of {self.url} don't match their tokens: adapters, or another version's hashes"
            cure = (
                f"set kv_cache_config's hash algorithm to {HASH_ALGORITHM}; requests with adapters can't be published"
            )
            self._diagnoses.set("hashes", seen, cure)
