"""Ingest of hybrid engines' events compared with a full-attention model's: CPU time per block in the publisher and the
store, and bytes per block in the store.

One simulated engine serves the same conversations with each model; its batches, as bytes, go through decoder, ledger and
outbox, and the messages are applied to a store. Sockets and NATS are left out: their cost depends only on the bytes.
"""

from time import process_time

from benchmarks.result import Result
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope, shard_of
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from kvatlas_simulator.cache.block_hash import Namespace
from kvatlas_simulator.engine.core import EngineCore
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.hybrid_cache import CacheGroup, HybridCache, Retention
from kvatlas_simulator.workload import Conversation, WorkloadSettings, generate_workload
from kvatlas_simulator.zmq_events import EventEncoding

BLOCK = 16
POOL = 24_576
WORKER = "hybrid"
USE = ScopeUse(Scope("bench", "other"), BLOCK)
MESSAGES_A_CALL = 64
MODELS = {
    "full attention": (("full",), 0),
    "sliding window of 128 tokens": (("full", "swa:128"), 0),
    "the same, kept at every block": (("full", "swa:128"), BLOCK),
    "mamba": (("full", "mamba"), 0),
    "chunks of 2,048 tokens": (("full", "chunked:2048"), 0),
}


async def measure(store: Store) -> list[Result]:
    results: list[Result] = []
    for name, (groups, interval) in MODELS.items():
        results += await _measure_model(store, name, _batches(groups, interval), groups)
    return results


def _batches(groups: tuple[str, ...], interval: int) -> list[bytes]:
    """The batches that the engine publishes, one per step."""
    parsed = [CacheGroup.parse(text) for text in groups]
    cache = HybridCache(parsed, num_blocks=POOL * len(parsed), block_size=BLOCK, retention=Retention(interval))
    engine, encoding = EngineCore(cache), EventEncoding(BLOCK, groups=cache.groups)
    workload = generate_workload(
        WorkloadSettings(sessions=40, system_prompt_tokens=(1_024, 3_072), user_tokens=(500, 2_500))
    )
    batches: list[bytes] = []
    conversations = [Conversation(session) for session in workload.sessions]
    while conversations:
        answers: dict[str, list[int]] = {}
        for conversation in list(conversations):
            turn = conversation.next_turn()
            if turn is None:
                conversations.remove(conversation)
                continue
            engine.submit(GenerationRequest(turn.session_id, tuple(turn.prompt), turn.max_tokens, Namespace()))
            answers[turn.session_id] = []
        while engine.has_work:
            step = engine.step(0.0)
            for token in step.tokens:
                answers[token.request_id].append(token.token_id)
            if step.events:
                batches.append(encoding.encode_batch(0.0, step.events))
        for conversation in conversations:
            conversation.add_answer(answers[conversation.session.session_id])
    return batches


async def _measure_model(store: Store, name: str, batches: list[bytes], groups: tuple[str, ...]) -> list[Result]:
    await store.client.execute_command("FLUSHALL", "SYNC")
    index = await open_redis_index(store, writer=True)
    chunks = [int(text.partition(":")[2]) for text in groups if text.startswith("chunked")]
    settings = PublisherSettings(worker_id=WORKER, model_id="bench", chunk_size=max(chunks, default=0))
    counters = PublisherCounters()
    ledger = Ledger(settings.ledger)
    changelog = Changelog(WORKER, ledger, counters)
    changelog.require_incarnation(IncarnationReason.START)
    partition = partition_of(WORKER, index.partitions)
    shard = shard_of(partition, index.shards)
    await index.put(USE, "other", Tier.HBM, b"12345678")
    now_us, publisher_s = 0, 0.0
    payloads: list[bytes] = []
    for batch in batches:
        began = process_time()
        changelog.record(decode_batch(EngineKind.VLLM, batch))
        now_us += 1_000_000
        changelog.publish(changelog.fold(), now_us, 0.0)
        if changelog.incarnation_due is not None:
            changelog.begin_incarnation(changelog.next_incarnation(now_us), now_us)
        while (sent := changelog.outbox.take()) is not None:
            payloads.append(sent.payload)
            changelog.outbox.acknowledge(sent.round, sent.seq, sent.seq + 1)
        publisher_s += process_time() - began
    used, before = await _used_bytes(store), await _store_cpu_s(store)
    for first in range(0, len(payloads), MESSAGES_A_CALL):
        messages = [wire.decode_raw(payload) for payload in payloads[first : first + MESSAGES_A_CALL]]
        result = await index.apply(shard, [PartitionBatch(partition, messages)])
        if (result.applied, result.failed_checks) != (len(messages), 0):
            raise RuntimeError(f"{name}: {result} of {len(messages)} messages")
    store_s = await _store_cpu_s(store) - before
    blocks, marks = ledger.announced_blocks, ledger.marked_blocks
    label = f"ingest, {name} ({marks / blocks:.1%} of {blocks:,} blocks marked)" if marks else f"ingest, {name}"
    return [
        Result(f"{label}: publisher", publisher_s / blocks * 1e6, "us/block"),
        Result(f"{label}: store", store_s / blocks * 1e6, "us/block"),
        Result(f"{label}: memory", (await _used_bytes(store) - used) / blocks, "bytes/block"),
    ]


async def _store_cpu_s(store: Store) -> float:
    info = await store.client.info("cpu")
    return float(info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"])


async def _used_bytes(store: Store) -> int:
    return int((await store.client.info("memory"))["used_memory"])
