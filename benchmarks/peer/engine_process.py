"""A child process that acts as several engines: `python -m benchmarks.peer.engine_process FIRST_PORT ENGINES HASHES`.

Engines publish messages of HASHES blocks each, in chains of CHAIN blocks that no other engine has. Turns, in this order:
`prepare MESSAGES FIRST LAST CONTENTS` makes that many messages for each of the engines FIRST to LAST - 1. Their chains are each
engine's own (CONTENTS `own`), the same for all (`same`), or its own but different ones (any other word). `publish RATE` waits
for subscribers and publishes the messages, one engine after another, RATE per second in total or (0) as fast as the subscribers
take them. With `clear FIRST LAST`, these engines drop their caches.
"""

import asyncio
import random
import sys
from collections.abc import Sequence
from time import perf_counter, sleep

from benchmarks.child_processes import take_turns
from benchmarks.peer.engines import Engines, encode_cleared, encode_stored
from benchmarks.peer.prompts import BLOCK_SIZE, VOCABULARY

CHAIN = 64
"""Blocks per chain; a multiple of every number of hashes per message."""


def chain_tokens(owner: int | str, number: int) -> list[int]:
    """The token ids of an owner's chain."""
    return random.Random(f"{owner}/{number}").choices(range(VOCABULARY), k=CHAIN * BLOCK_SIZE)


def chain_owner(contents: str, engine: int) -> int | str:
    """The owner of an engine's chains: see `prepare`."""
    if contents == "same":
        return contents
    return engine if contents == "own" else f"{contents}/{engine}"


def last_chain(owner: int | str, hashes: int, messages: int) -> list[int]:
    """The token ids of the last chain that is complete after an engine's first `messages` messages."""
    return chain_tokens(owner, messages * hashes // CHAIN - 1)


def _encode_messages(owner: int | str, hashes: int, messages: int) -> list[bytes]:
    payloads: list[bytes] = []
    for number in range(messages * hashes // CHAIN):
        tokens, parent = chain_tokens(owner, number), None
        for first in range(0, CHAIN, hashes):
            payload, parent = encode_stored(
                tokens[first * BLOCK_SIZE : (first + hashes) * BLOCK_SIZE], BLOCK_SIZE, parent
            )
            payloads.append(payload)
    return payloads


class _Process:
    def __init__(self, engines: Engines, hashes: int) -> None:
        self._engines = engines
        self._hashes = hashes
        self._prepared: list[tuple[int, bytes]] = []
        self._subscribed = False

    async def turn(self, line: str) -> Sequence[str]:
        what, *args = line.split()
        if what == "prepare":
            messages, first, last = map(int, args[:3])
            by_engine = [
                _encode_messages(chain_owner(args[3], engine), self._hashes, messages) for engine in range(first, last)
            ]
            self._prepared = [
                (engine, payload)
                for payloads in zip(*by_engine, strict=True)
                for engine, payload in enumerate(payloads, first)
            ]
        elif what == "clear":
            for engine in range(*map(int, args)):
                self._engines.publish(engine, encode_cleared())
        else:
            await asyncio.to_thread(self._publish, float(args[0]))
        return []

    def _publish(self, rate: float) -> None:
        if not self._subscribed:
            self._engines.wait_for_subscribers()
            self._subscribed = True
        began = perf_counter()
        for number, (engine, payload) in enumerate(self._prepared):
            if rate and (ahead_s := number / rate - (perf_counter() - began)) > 0:
                sleep(ahead_s)
            self._engines.publish(engine, payload)


if __name__ == "__main__":
    with Engines(int(sys.argv[2]), int(sys.argv[1])) as bound:
        asyncio.run(take_turns(_Process(bound, int(sys.argv[3])).turn))
