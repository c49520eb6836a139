"""Policies that guess the engines' caches from the requests that they sent there, without events.

Both remember the prefixes that they sent to an engine, dropping the least recently used first, up to the size of that
engine's cache: the best possible configuration of a gateway.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas_simulator.lab.engine import VirtualEngine
from kvatlas_simulator.lab.policies.protocol import OpenRequests
from kvatlas_simulator.lab.requests import LabRequest


class SentPrefixes:
    """The prefixes sent to one engine, as sequence hashes."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, chain: Sequence[bytes]) -> int:
        """Number of a prompt's leading blocks that were sent there."""
        return next((i for i, block in enumerate(chain) if block not in self._blocks), len(chain))

    def add(self, chain: Sequence[bytes]) -> None:
        """Record a prompt that was sent there. Its tail is dropped first."""
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)


def packed_chain(request: LabRequest, block_tokens: int) -> list[bytes]:
    """A prompt's blocks as scope and sequence hash, for `SentPrefixes`."""
    packed = request.identity.scope.scope_id, request.prompt_chain(block_tokens)
    return [packed[0] + packed[1][at : at + HASH_BYTES] for at in range(0, len(packed[1]), HASH_BYTES)]


class CacheAwareTree(OpenRequests):
    """SGLang's router (policy `cache_aware`, defaults of its documentation). If open requests differ by more than
    `balance_abs` and by a factor of more than `balance_rel`: the engine with the fewest. Otherwise the one with the longest
    match if that is more than `cache_threshold` of the prompt, or else the one that was sent the least.
    """

    def __init__(
        self,
        engines: Sequence[VirtualEngine],
        *,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
    ) -> None:
        super().__init__(len(engines))
        self._block_tokens = engines[0].block_tokens
        self._sent = [SentPrefixes(engine.cache.num_blocks) for engine in engines]
        self._cache_threshold = cache_threshold
        self._balance = balance_abs, balance_rel

    def choose(self, request: LabRequest, now_us: float) -> int:
        chain, numbers = packed_chain(request, self._block_tokens), range(len(self.open))
        most, least = max(self.open), min(self.open)
        if most - least > self._balance[0] and most > least * self._balance[1]:
            chosen = self.open.index(least)
        else:
            matched = [sent.matched(chain) for sent in self._sent]
            chosen = max(numbers, key=matched.__getitem__)
            if matched[chosen] * self._block_tokens <= self._cache_threshold * request.input_tokens:
                chosen = min(numbers, key=lambda i: len(self._sent[i]))
        self._sent[chosen].add(chain)
        return self.send(chosen)


class WeightedScorers(OpenRequests):
    """The Gateway API inference extension's endpoint picker with its default scorers: 3 x the matched part of the prompt, 2
    x the shortness of the queue, 2 x the free part of the cache. It reads engines' metrics every 50 ms; here it sees
    current values, which favours it.
    """

    def __init__(self, engines: Sequence[VirtualEngine], rng: random.Random) -> None:
        super().__init__(len(engines))
        self._engines = engines
        self._rng = rng
        self._block_tokens = engines[0].block_tokens
        self._sent = [SentPrefixes(engine.cache.num_blocks) for engine in engines]

    def choose(self, request: LabRequest, now_us: float) -> int:
        chain = packed_chain(request, self._block_tokens)
        queues = [len(engine.waiting) for engine in self._engines]
        longest, span = max(queues), max(queues) - min(queues)
        scores = [
            3 * (sent.matched(chain) / len(chain) if chain else 0.0)
            + 2 * ((longest - queue) / span if span else 1.0)
            + 2 * (1 - engine.kv_tokens / engine.capacity_tokens)
            for engine, queue, sent in zip(self._engines, queues, self._sent, strict=True)
        ]
        best = max(scores)
        chosen = self._rng.choice([i for i, score in enumerate(scores) if score == best])
        self._sent[chosen].add(chain)
        return self.send(chosen)
