"""An engine of the open event forms without a ZMQ socket. Its batches are read from standard input, or posted to the status
page.

Nothing is saved, because neither source can replay missed batches: the publisher starts empty and learns of blocks from new
batches. When standard input ends, everything read is published and the worker leaves.
"""

import logging
import os
import sys
from collections.abc import AsyncIterator
from time import monotonic

import anyio
import zmq.asyncio
from nats.aio.client import Client

from kvatlas.errors import EngineEventError
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engine_events import EngineBatch
from kvatlas_publishers.engines import MAX_PAYLOAD_BYTES
from kvatlas_publishers.feed.dead_letters import DeadLetters
from kvatlas_publishers.feed.open_batches import OpenBatches
from kvatlas_publishers.feed.undecodable import STARTING_OVER, Distrust
from kvatlas_publishers.sources.eventless_engine import EventlessEngine

READ_BYTES = 1 << 16
LINES_AT_ONCE = 64
"""Number of lines read before other tasks get a turn."""
FLUSH_S = 30.0

log = logging.getLogger("kvatlas.publisher")


class OpenEngine(EventlessEngine):
    """One such engine; `take` is for batches posted to the page."""

    def __init__(self, settings: PublishSettings) -> None:
        super().__init__(settings)
        self._from_stdin = settings.source is not None
        self._distrust = Distrust()
        self._distrust_unknown = settings.distrust_poison
        letters = settings.state_dir / f"{self.worker_id}.dead-letters.jsonl" if settings.state_dir else None
        self._dead_letters = DeadLetters(letters, self.worker_id)
        self._log = RateLimitedLog(log, f"worker {self.worker_id}: ")

    def open(self, client: Client, context: zmq.asyncio.Context) -> None:
        super().open(client, context)
        self._batches = OpenBatches(self._publisher)

    async def _follow(self) -> None:
        if not self._from_stdin:
            await anyio.sleep_forever()
        await self._read_lines(_stdin_chunks())
        log.info("worker %s: standard input ended; publishing what was read, then exiting", self.worker_id)
        with anyio.move_on_after(FLUSH_S):
            await self._publisher.flush()

    def take(self, payload: bytes) -> EngineBatch:
        """Record one batch. If it is not a batch, it is counted, kept as a dead letter, and EngineEventError is raised. No
        blocks are dropped, because the caller gets the error and sends the batch again."""
        try:
            batch = self._batches.take(payload)
        except EngineEventError as error:
            self._publisher.counters.poison_malformed += 1
            self._record_undecodable(str(error), payload)
            raise
        if batch.has_lost(distrust_unknown=self._distrust_unknown):
            self._record_loss("a batch is not fully readable, and may have removed blocks")
        return batch

    # ---------------------------------------------------------------- standard input

    async def _read_lines(self, chunks: AsyncIterator[bytes]) -> None:
        """Read one batch per line. Unreadable lines are skipped."""
        rest, number, too_long = b"", 0, False
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                number += 1
                if too_long:
                    too_long = False  # the end of a line whose beginning was dropped
                else:
                    self._take_line(number, line)
                if number % LINES_AT_ONCE == 0:
                    await anyio.lowlevel.checkpoint()
            if len(rest) > MAX_PAYLOAD_BYTES:
                if not too_long:
                    self._publisher.counters.poison_oversized += 1
                    why = f"line of more than {MAX_PAYLOAD_BYTES} bytes"
                    self._record_undecodable(why, rest[:READ_BYTES])
                    self._log.report("undecodable", f"skipped line {number + 1}: {why}")
                    self._record_loss(why)
                rest, too_long = b"", True
        if not too_long:
            self._take_line(number + 1, rest)

    def _take_line(self, number: int, line: bytes) -> None:
        if not line.strip():
            return
        try:
            self.take(line)
        except EngineEventError as error:
            self._log.report("undecodable", f"skipped line {number}: {error}")
            self._record_loss(str(error))

    # ---------------------------------------------------------------- what may have been missed

    def _record_undecodable(self, why: str, payload: bytes) -> None:
        counters = self._publisher.counters
        counters.poison += 1
        counters.feed_lost += 1
        if not self._dead_letters.keep(why, None, payload):
            counters.dead_letters_dropped += 1

    def _record_loss(self, why: str) -> None:
        """Record that some claimed blocks may be gone: see `kvatlas_publishers.feed.undecodable`."""
        if self._distrust.record_loss(monotonic()):
            self._start_over(why)

    def _start_over(self, why: str) -> None:
        log.warning("worker %s: %s; %s", self.worker_id, why, STARTING_OVER)
        self._publisher.start_over()
        self._batches.forget()


async def _stdin_chunks() -> AsyncIterator[bytes]:
    """Chunks of standard input, until it ends."""
    handle, waits = sys.stdin.fileno(), True
    while True:
        if waits:
            try:
                await anyio.wait_readable(handle)
            except OSError:  # a file is always readable, so it can't be waited for
                waits = False
        else:
            await anyio.lowlevel.checkpoint()
        if not (chunk := os.read(handle, READ_BYTES)):
            return
        yield chunk
