"""Gateways' policies, as shipped by their projects: SGLang's router, and the scorers of the inference extension and of llm-d.

All but llm-d's guess an engine's cache from the requests sent to it: they remember those prefixes, and drop the least recently
used ones first.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_simulator.lab.engine import VirtualEngine
from kvatlas_simulator.lab.policies.engine_names import worker_name
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
        """Number of a prompt's leading blocks that were sent to the engine."""
        return next((i for i, block in enumerate(chain) if block not in self._blocks), len(chain))

    def add(self, chain: Sequence[bytes]) -> None:
        """Record a prompt that was sent to the engine. Its tail is dropped first."""
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)


def packed_chain(request: LabRequest, block_tokens: int) -> Sequence[bytes]:
    """A prompt's blocks as scope and sequence hash, for `SentPrefixes`."""
    return _split(request.identity.scope.scope_id, request.prompt_chain(block_tokens))


@lru_cache(maxsize=4_096)
def _split(scope_id: bytes, chain: bytes) -> Sequence[bytes]:
    return tuple(scope_id + chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES))


class SglangRouter(OpenRequests):
    """SGLang's router (sglang-router 0.3.2, policy `cache_aware`, its defaults), of which vLLM's router is a fork.

    If open requests differ by more than BALANCE_ABS and by a factor of more than BALANCE_REL: the engine with the fewest.
    Otherwise an engine with the longest match, if that is more than CACHE_THRESHOLD of the prompt; failing that, the engine
    with the fewest open requests. Ties go to the first engine. Its trees hold 2^26 characters; here, a token counts as 4.
    `tests/benchmarks/test_rivals.py` compares it with the wheel.
    """

    CACHE_THRESHOLD = 0.3
    BALANCE_ABS = 64
    BALANCE_REL = 1.5
    TREE_TOKENS = (1 << 26) // 4

    def __init__(self, engines: Sequence[VirtualEngine], rng: random.Random) -> None:
        super().__init__(engines, rng)
        self._block_tokens = engines[0].block_tokens
        self._sent = [SentPrefixes(self.TREE_TOKENS // self._block_tokens) for _ in engines]

    def choose(self, request: LabRequest, now_us: float) -> int:
        chosen = self.allowed(request)[0]
        self.record(request, chosen)
        return self.send(chosen)

    def allowed(self, request: LabRequest) -> list[int]:
        """The engines that the router may choose: several if their matches are equally long."""
        up = self.up
        least = min(up, key=self.open.__getitem__)
        most, fewest = max(self.open[engine] for engine in up), self.open[least]
        if most - fewest > self.BALANCE_ABS and most > fewest * self.BALANCE_REL:
            return [least]
        chain = packed_chain(request, self._block_tokens)
        matched = {engine: self._sent[engine].matched(chain) for engine in up}
        longest = max(matched.values())
        if longest * self._block_tokens <= self.CACHE_THRESHOLD * request.input_tokens:
            return [least]
        return [engine for engine in up if matched[engine] == longest]

    def record(self, request: LabRequest, engine: int) -> None:
        """Record that the prompt is in this engine's tree."""
        self._sent[engine].add(packed_chain(request, self._block_tokens))


class InferenceExtension(OpenRequests):
    """The endpoint picker of the Gateway API inference extension with its default scorers: 3 × the matched part of the prompt,
    2 × the shortness of the queue, 2 × the free part of the cache.

    It matches at most 256 blocks of 64 characters (16 tokens), and remembers as many blocks as an engine reports (`autoTune`).
    It reads engines' metrics every 50 ms; here it sees current values, which favors it. `MOST_TOKENS` 0: there is no such
    bound. Source: kubernetes-sigs/gateway-api-inference-extension, prefix plugin (`DefaultMaxPrefixBlocks`).
    """

    WEIGHTS = (3.0, 2.0, 2.0)
    MOST_TOKENS = 256 * 16

    def __init__(self, engines: Sequence[VirtualEngine], rng: random.Random) -> None:
        super().__init__(engines, rng)
        self._block_tokens = engines[0].block_tokens
        self._sent = [SentPrefixes(engine.cache.num_blocks) for engine in engines]

    def choose(self, request: LabRequest, now_us: float) -> int:
        up, engines = self.up, self.engines
        queues = [len(engines[number].waiting) for number in up]
        longest, span = max(queues), max(queues) - min(queues)
        prefixes = self._prefix_scores(request, up)
        by_prefix, by_queue, by_cache = self.WEIGHTS
        chosen = self.least(
            (
                number,
                -by_prefix * prefix
                - by_queue * ((longest - queue) / span if span else 1.0)
                - by_cache * (1 - engines[number].kv_tokens / engines[number].capacity_tokens),
            )
            for number, queue, prefix in zip(up, queues, prefixes, strict=True)
        )
        self._remember(request, chosen)
        return self.send(chosen)

    def _prefix_scores(self, request: LabRequest, up: Sequence[int]) -> list[float]:
        chain = self._chain(request)
        return [self._sent[number].matched(chain) / len(chain) if chain else 0.0 for number in up]

    def _remember(self, request: LabRequest, chosen: int) -> None:
        self._sent[chosen].add(self._chain(request))

    def _chain(self, request: LabRequest) -> Sequence[bytes]:
        chain = packed_chain(request, self._block_tokens)
        return chain[: max(1, self.MOST_TOKENS // self._block_tokens)] if self.MOST_TOKENS else chain


class UnboundedExtension(InferenceExtension):
    """The same picker, but it matches whole prompts, so it is better than the shipped version."""

    MOST_TOKENS = 0


class LlmD(InferenceExtension):
    """llm-d's scheduler with its configuration for precise prefixes: 2 × what the engines' events say (from 0 for the
    fewest blocks held by any holder to 1 for the most), 1 × the shortness of the queue, 1 × the free part of the cache.

    Source: llm-d-inference-scheduler, deploy/config/epp-precise-prefix-cache-config.yaml and pkg/plugins/scorer.
    """

    WEIGHTS = (2.0, 1.0, 1.0)

    def __init__(self, engines: Sequence[VirtualEngine], rng: random.Random, index: MemoryIndex) -> None:
        super().__init__(engines, rng)
        self._index = index

    def _prefix_scores(self, request: LabRequest, up: Sequence[int]) -> list[float]:
        chain = request.prompt_chain(self._block_tokens)
        depths = self._index.overlap_now(request.identity.scope, chain).depths() if chain else {}
        held = {number: depth for number in up if (depth := depths.get(worker_name(number), 0))}
        fewest, span = min(held.values(), default=0), max(held.values(), default=0) - min(held.values(), default=0)
        return [((held[number] - fewest) / span if span else 1.0) if number in held else 0.0 for number in up]

    def _remember(self, request: LabRequest, chosen: int) -> None:
        """Do nothing, because events do that."""
