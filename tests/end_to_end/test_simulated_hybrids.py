"""Simulated hybrid engines: after each batch, the store's marks equal those computed from scratch from the engine's cache."""

import random
from collections.abc import AsyncIterator
from itertools import count

import pytest

from kvatlas.blocks.external_chain import hash_text
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import open_store
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.block_hash import Namespace, SeededBlockHasher
from kvatlas_simulator.hybrid_cache import CacheGroup, HybridCache, Retention
from kvatlas_simulator.hybrid_cache.resident_blocks import list_hybrid_blocks
from kvatlas_simulator.zmq_events import EventEncoding
from router_client import Prompt
from tests.end_to_end.socketless_worker import SocketlessWorker

pytestmark = pytest.mark.anyio

BLOCK = 4
MODELS = {
    "swa": ("full", "swa:10"),
    "two swa": ("swa:6", "full", "swa:33"),
    "mamba": ("mamba", "full"),
    "chunked": ("full", "chunked:16"),
    "all": ("full", "swa:10", "mamba", "chunked:16"),
}


@pytest.fixture
async def index(fresh_valkey: str) -> AsyncIterator[ResidencyIndex]:
    store = await open_store(fresh_valkey, wait=False)
    yield await open_redis_index(store, writer=True)
    await store.close()


class Engine:
    """A cache under random requests that grow, fork and repeat, some with an adapter; the pool overflows all the time."""

    def __init__(self, groups: tuple[str, ...], interval: int, chance: random.Random) -> None:
        parsed = [CacheGroup.parse(text) for text in groups]
        hasher = SeededBlockHasher(chance.getrandbits(64))
        self.cache = HybridCache(parsed, num_blocks=150, block_size=BLOCK, retention=Retention(interval), hasher=hasher)
        self._encoding = EventEncoding(BLOCK, ("lora",), groups=self.cache.groups)
        self._chance = chance
        self._prompts: list[tuple[Namespace, list[int]]] = [(Namespace(), []), (Namespace("lora"), [])]
        self._live: dict[str, list[int]] = {}
        self._names = map(str, count())

    def draw(self) -> tuple[Namespace, list[int]]:
        """The next prompt."""
        chance = self._chance
        namespace, like = chance.choice(self._prompts[-8:])
        cut = len(like) if chance.random() < 0.5 else chance.randint(0, len(like))
        if chance.random() < 0.3:
            cut -= cut % BLOCK
        return namespace, (like[:cut] + self._tokens(1, 40))[-140:]

    def step(self, namespace: Namespace, prompt: list[int]) -> bytes | None:
        """Begin the request, continue some of the others, end some. Returns the batch, if anything happened."""
        chance, cache = self._chance, self.cache
        request = AllocationRequest(next(self._names), prompt, namespace)
        while not cache.can_allocate(request):
            self._end(next(iter(self._live)))
        cache.allocate(request)
        self._live[str(request.sequence_id)] = self._tokens(0, 12)
        for name in [name for name in self._live if chance.random() < 0.6]:
            some, self._live[name] = self._live[name][:5], self._live[name][5:]
            if some and cache.can_extend(name, len(some)):
                cache.extend(name, some)
            else:
                self._end(name)
        self._prompts.append((namespace, prompt))
        events = cache.take_events()
        return self._encoding.encode_batch(0.0, events) if events else None

    def _end(self, name: str) -> None:
        self.cache.free(name)
        del self._live[name]

    def _tokens(self, low: int, high: int) -> list[int]:
        return [self._chance.randrange(50_000) for _ in range(self._chance.randint(low, high))]


async def marked_blocks(index: ResidencyIndex) -> set[tuple[str | None, str, bool | None]]:
    return {(one.scope.adapter_id, hash_text(one.sequence_hash), one.resumable) async for one in index.snapshot("w")}


@pytest.mark.parametrize(("model", "interval"), [*((model, 0) for model in MODELS), ("all", 2 * BLOCK)])
async def test_after_each_batch_the_stores_marks_are_those_of_the_cache(
    model: str, interval: int, index: ResidencyIndex
) -> None:
    engine = Engine(MODELS[model], interval, random.Random(f"{model} {interval}"))
    chunk = max((group.tokens for group in engine.cache.groups if group.kind.value.startswith("chunked")), default=0)
    worker = SocketlessWorker(
        PublisherSettings(worker_id="w", model_id="hybrid", engine=EngineKind.MOCK, chunk_size=chunk), index
    )
    await worker.send()
    seen: set[bool] = set()
    hits = 0
    for number in range(60):
        namespace, prompt = engine.draw()
        predicted = await worker.usable_tokens(Prompt.of_tokens(Scope("hybrid", "hybrid", namespace.adapter), prompt))
        hit = engine.cache.match(prompt, namespace).hit_tokens
        assert predicted == hit, f"prompt {number}"
        hits += hit > 0
        if (batch := engine.step(namespace, prompt)) is not None:
            await worker.take(batch)
        blocks = {
            (one["adapter_id"], one["sequence_hash"], one["resumable"]) for one in list_hybrid_blocks(engine.cache)
        }
        assert await marked_blocks(index) == blocks, f"after batch {number}"
        seen.update(resumable for _, _, resumable in blocks)
    await worker.check()
    assert seen == {True, False} and hits > 15
