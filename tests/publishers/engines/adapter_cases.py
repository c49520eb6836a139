"""The engine adapters, and the data with which each is tested. A new adapter is one file in `publishers/engines`, its
recordings, and a line here; `test_conformance.py` defines what it must do.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from kvatlas.errors import EngineEventError
from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engine_events import EngineBatch, EngineStored
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.engines.tensorrt_llm import EventDecoder, read_records
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.engines.open_traffic import BLOCK as OPEN_BLOCK
from tests.publishers.engines.open_traffic import KEPT as OPEN_KEPT
from tests.publishers.engines.open_traffic import OpenTraffic
from tests.publishers.recordings import FILES, read_recording
from tests.publishers.trtllm_serve import BLOCK, TrtllmServe

Decode = Callable[[bytes], EngineBatch]


@dataclass(frozen=True)
class AdapterCase:
    """`decoder()` makes a decoder for a new engine process, which raises only EngineEventError. `payloads`: what the engine
    sent, in order; `blocks`: number of blocks announced at the end."""

    name: str
    decoder: Callable[[], Decode]
    payloads: Sequence[bytes]
    blocks: int
    settings: dict[str, object] = field(default_factory=dict)

    def ledger(self) -> Ledger:
        return Ledger(LedgerSettings("m", "t", **self.settings))  # type: ignore[arg-type]


def _zmq(kind: EngineKind) -> Callable[[], Decode]:
    return lambda: lambda payload: decode_batch(kind, payload)


def _drained() -> Decode:
    decoder = EventDecoder()

    def decode(body: bytes) -> EngineBatch:
        events = []
        skipped = []
        lost = False
        for record in read_records(body):
            try:
                events += decoder.decode(record)
            except EngineEventError as error:
                skipped.append(str(error))
                if record.kind != "stored":
                    lost = True
                    events.clear()
        return EngineBatch(events, skipped=skipped, lost=lost)

    return decode


def _trtllm_answers() -> Sequence[bytes]:
    """The answers of an engine whose cache is small: prompts that share heads, evicted leaf first, some by way of the second
    level."""
    engine, rng = TrtllmServe(), random.Random(7)
    known: dict[tuple[int, ...], int] = {}
    level: dict[int, int] = {}
    answers = []
    for _ in range(120):
        topic, length = rng.randrange(4), rng.randint(1, 6) * BLOCK
        prompt = [topic * 1_000 + at for at in range(2 * BLOCK)] + [rng.randrange(3) for _ in range(length)]
        depth = 0
        while tuple(prompt[: depth + BLOCK]) in known and depth < len(prompt):
            depth += BLOCK
        if depth < len(prompt):
            names = engine.store(prompt[depth:], known.get(tuple(prompt[:depth])))
            for at, name in enumerate(names):
                known[tuple(prompt[: depth + (at + 1) * BLOCK])] = name
                level[name] = 0
        while len(known) > 40:
            leaves = [
                one for one in known if not any(len(other) > len(one) and other[: len(one)] == one for other in known)
            ]
            leaf = rng.choice(leaves)
            name = known[leaf]
            if level[name] == 0 and rng.random() < 0.3:
                engine.move(name, 0, 1)
                level[name] = 1
                continue
            engine.remove(name)
            del known[leaf]
        if rng.random() < 0.5:
            answers.append(engine.drain())
    return [*answers, engine.drain()]


@cache
def cases() -> Sequence[AdapterCase]:
    found = []
    for file in FILES:
        one = read_recording(file)
        settings: dict[str, object] = {"adapter_ids": {"1": "1", "2": "2"}}  # vLLM 0.11 does not report adapters' names
        payloads = [payload for _, payload in one.batches]
        found.append(AdapterCase(one.name, _zmq(one.kind), payloads, len(one.expected_usable), settings))
    drained = AdapterCase("tensorrt_llm", _drained, _trtllm_answers(), 40, {"set_semantics": True})
    settings = {"set_semantics": True, "salt_is_tenant": True, "block_size": OPEN_BLOCK}
    plain = AdapterCase("open", _zmq(EngineKind.OPEN), OpenTraffic(numbered=False).batches, OPEN_KEPT, settings)
    router = AdapterCase("open_router_protocol", _sized, OpenTraffic(numbered=True).batches, OPEN_KEPT, settings)
    return [*found, drained, plain, router]


def _sized() -> Decode:
    """The router protocol has no block size; it comes from the publisher's settings."""

    def decode(payload: bytes) -> EngineBatch:
        batch = decode_batch(EngineKind.OPEN, payload)
        events = [replace(one, block_size=OPEN_BLOCK) if isinstance(one, EngineStored) else one for one in batch.events]
        return replace(batch, events=events)

    return decode
