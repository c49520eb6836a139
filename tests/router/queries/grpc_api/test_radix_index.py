"""The streams of SGLang's model gateway (SMG) to its radix index, as the bytes that it sends."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from struct import pack

import grpc
import pytest

from kvatlas.blocks.hashing import local_hash
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas_router.queries.grpc_api.radix_index import MOST_BLOCKS, SERVICE
from kvatlas_router.queries.grpc_api.radix_index_pb2 import Match, PublishAck
from kvatlas_router.tenancy.proof import hash_of
from tests.router.proxy.engines import BLOCK_SIZE, MODEL, record
from tests.router.queries.servers import TOKENS, hold, rank, running_index_server, write

pytestmark = pytest.mark.anyio

TOKENS_KIND, BYTES_KIND = 1, 2
CONTENT = [local_hash(TOKENS[at : at + BLOCK_SIZE]) for at in range(0, len(TOKENS), BLOCK_SIZE)]


def varint(number: int, value: int) -> bytes:
    """A message's field with a number."""
    assert number < 16
    return bytes((number << 3,)) + _number(value)


def nested(number: int, payload: bytes) -> bytes:
    """A message's field with text, a message or packed numbers."""
    return bytes((number << 3 | 2,)) + _number(len(payload)) + payload


def _number(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    return bytes((value & 127 | 128,)) + _number(value >> 7)


def keyspace(model: str = MODEL, kind: int = TOKENS_KIND, size: int = BLOCK_SIZE, scheme: int = 1) -> bytes:
    return nested(1, model.encode()) + varint(2, kind) + varint(3, size) + varint(4, scheme)


def query(id: int, space: bytes, hashes: Sequence[int] = CONTENT) -> bytes:
    return varint(1, id) + nested(2, space) + nested(3, pack(f"<{len(hashes)}Q", *hashes))


async def ask(port: int | None, *queries: bytes, **metadata: str) -> dict[int, list[tuple[str, int]]]:
    """(worker's address, blocks) by query, all over one stream."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        subscribe: grpc.aio.StreamStreamMultiCallable[bytes, Match] = channel.stream_stream(
            f"/{SERVICE}/Subscribe", request_serializer=None, response_deserializer=Match.FromString
        )
        call = subscribe(_sent(queries), metadata=tuple(metadata.items()), timeout=60)
        answers = [answer async for answer in call]
    for score in (score for answer in answers for score in answer.scores):
        assert score.event_fed and [(one.start, one.end) for one in score.intervals] == [(0, score.matched_blocks)]
    return {answer.query_id: [(one.holder, one.matched_blocks) for one in answer.scores] for answer in answers}


async def _sent(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def test_each_query_gets_one_match_with_the_engines_that_hold_its_start(store: Store, valkey_url: str) -> None:
    index = await open_redis_index(store, writer=True)
    await write(store, rank("a", 0), rank("a", 1), record("b", "http://b:8000"), record("c", "http://c:8000"))
    await hold(index, "a-dp0", TOKENS[:4])
    await hold(index, "a-dp1", TOKENS)
    await hold(index, "b", TOKENS[:8])
    async with running_index_server(valkey_url, grpc_port=0) as (_, port):
        own = keyspace()
        queries = [
            query(1 << 40, own),
            query(2, own, CONTENT[:1]),
            query(3, own, [*CONTENT[:1], 7]),
            query(4, keyspace(scheme=0)),
            query(5, own, [7]),
            query(6, own, []),
            query(7, own, CONTENT * (MOST_BLOCKS // 4 + 1)),
            query(8, keyspace(model="other")),
            query(9, keyspace(kind=BYTES_KIND)),
            query(10, keyspace(size=2 * BLOCK_SIZE)),
            query(11, keyspace(size=0)),
            query(12, keyspace(scheme=2)),
            *(query(number, own) for number in range(100, 200)),
        ]
        all_of_it, first = [("http://a:8000", 4), ("http://b:8000", 2)], [("http://a:8000", 1), ("http://b:8000", 1)]
        found = await ask(port, *queries)
        answered = {1 << 40, 4, *range(100, 200)}
        assert found == {
            **dict.fromkeys(answered, all_of_it),
            **dict.fromkeys((2, 3), first),
            **{id: [] for id in range(5, 13)},
        }


async def test_what_the_gateway_publishes_is_acknowledged_and_changes_nothing(store: Store, valkey_url: str) -> None:
    await open_redis_index(store, writer=True)
    await write(store, record("b", "http://b:8000"))
    block = b"\x09" + pack("<Q", CONTENT[0]) + b"\x11" + pack("<Q", CONTENT[0])
    placement = nested(5, nested(1, nested(2, block)))
    update = nested(1, keyspace()) + nested(2, b"http://b:8000") + varint(3, 1)
    added, dropped = nested(6, b""), varint(7, 1)
    async with running_index_server(valkey_url, grpc_port=0) as (_, port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            publish: grpc.aio.StreamStreamMultiCallable[bytes, PublishAck] = channel.stream_stream(
                f"/{SERVICE}/Publish", request_serializer=None, response_deserializer=PublishAck.FromString
            )
            updates = [update + placement, update + added, update + dropped, update + varint(4, 9)]
            acks = [ack async for ack in publish(_sent(updates), timeout=60)]
            assert [(ack.holder, ack.epoch, ack.applied_seq) for ack in acks] == [
                ("http://b:8000", 1, n) for n in (0, 0, 0, 9)
            ]
            other_scheme = nested(1, keyspace(scheme=2)) + nested(2, b"http://b:8000")
            with pytest.raises(grpc.aio.AioRpcError, match="hash scheme 2; expected 1") as refused:
                _ = [ack async for ack in publish(_sent([other_scheme]), timeout=60)]
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await ask(port, query(1, keyspace())) == {1: []}


async def test_a_stream_sees_its_tenant_alone(store: Store, valkey_url: str, tmp_path: Path) -> None:
    index = await open_redis_index(store, writer=True)
    await write(store, record("b", "http://b:8000"))
    await hold(index, "b", TOKENS, scope=Scope(MODEL, MODEL, None, "acme"))
    clients = tmp_path / "clients.toml"
    clients.write_text(
        f'[clients.a]\nkeys = ["{hash_of(b"key-a")}"]\ntenants = ["acme"]\n'
        f'[clients.g]\nkeys = ["{hash_of(b"key-g")}"]\ntenants = ["globex"]\n'
    )
    async with running_index_server(valkey_url, grpc_port=0, clients_file=clients, control_port=0) as (_, port):
        asked = query(1, keyspace())
        assert await ask(port, asked, authorization="Bearer key-a") == {1: [("http://b:8000", 4)]}
        assert await ask(port, asked, authorization="Bearer key-g") == {1: []}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(port, asked)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
