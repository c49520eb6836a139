"""gRPC: our own queries, and those of SGLang's gateway as the bytes that it sends."""

from collections.abc import Sequence
from pathlib import Path
from struct import pack

import grpc
import pytest

from kvatlas.blocks.external_chain import external_chain, hash_text
from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas_router.queries.grpc_api.index_pb2 import OverlapRequest, OverlapResponse
from kvatlas_router.queries.grpc_api.kv_indexer_pb2 import MatchExternalKvPrefixResponse
from kvatlas_router.queries.grpc_api.server import SERVICE, SGLANG_SERVICE
from kvatlas_router.tenancy.proof import hash_of
from tests.router.proxy.engines import BLOCK_SIZE, MODEL, record
from tests.router.queries.servers import TOKENS, hold, rank, running_index_server, write

pytestmark = pytest.mark.anyio

SEQUENCE = unpack_hashes(extend_chain(TOKENS, BLOCK_SIZE))
ENGINES_OWN = [-895308556211281782, 978178666101069530, 3]
LENGTH_DELIMITED = 2


def field(number: int, payload: bytes) -> bytes:
    """A message's field in wire format; only for short ones."""
    assert len(payload) < 128
    return bytes((number << 3 | LENGTH_DELIMITED, len(payload))) + payload


def as_text(hashes: Sequence[int]) -> bytes:
    """`repeated string hashes = 1`."""
    return b"".join(field(1, str(value).encode()) for value in hashes)


def as_numbers(hashes: Sequence[int]) -> bytes:
    """`repeated sfixed64 hashes = 1`."""
    return field(1, pack(f"<{len(hashes)}q", *hashes))


async def match(port: int | None, request: bytes, **metadata: str) -> list[tuple[str, int]]:
    """(worker's address, blocks) as SGLang's gateway gets them."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, MatchExternalKvPrefixResponse] = channel.unary_unary(
            f"/{SGLANG_SERVICE}/MatchExternalKvPrefix",
            request_serializer=None,
            response_deserializer=MatchExternalKvPrefixResponse.FromString,
        )
        answer = await call(request, metadata=tuple(metadata.items()), timeout=60)
    found = [(one.worker_address, one.matched_prefix_blocks) for one in answer.matches]
    assert answer.best_prefix_blocks == max((blocks for _, blocks in found), default=0)
    return found


async def overlap(port: int | None, request: OverlapRequest, **metadata: str) -> list[tuple[str, int, int]]:
    """(instance, resident tokens, usable tokens)"""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[OverlapRequest, OverlapResponse] = channel.unary_unary(
            f"/{SERVICE}/Overlap",
            request_serializer=OverlapRequest.SerializeToString,
            response_deserializer=OverlapResponse.FromString,
        )
        answer = await call(request, metadata=tuple(metadata.items()), timeout=60)
    return [(one.instance, one.resident_tokens, one.usable_tokens) for one in answer.holders]


async def test_questions_by_tokens_and_by_sequence_hashes(store: Store, valkey_url: str) -> None:
    index = await open_redis_index(store, writer=True)
    await write(store, rank("a", 0), record("b", "http://b:8000"))
    await hold(index, "a-dp0", TOKENS)
    await hold(index, "b", TOKENS[:8])
    async with running_index_server(valkey_url, grpc_port=0) as (_, port):
        held = [("a", 16, 12), ("b", 8, 8)]
        assert await overlap(port, OverlapRequest(model=MODEL, token_ids=TOKENS)) == held
        by_hash = OverlapRequest(model=MODEL, hashes=SEQUENCE, block_size=BLOCK_SIZE)
        assert [one[:2] for one in await overlap(port, by_hash)] == [one[:2] for one in held]
        signed = [value - (1 << 64) if value >> 63 else value for value in SEQUENCE]
        addresses = [("http://a:8000", 4), ("http://b:8000", 2)]
        assert await match(port, as_text(SEQUENCE)) == await match(port, as_numbers(signed)) == addresses
        assert await match(port, as_numbers(signed) + bytes((2 << 3, 1))) == [
            ("http://a:8000", 1),
            ("http://b:8000", 1),
        ]
        for wrong in (OverlapRequest(model=MODEL), OverlapRequest(model=MODEL, token_ids=[1], text="x")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await overlap(port, wrong)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await overlap(port, OverlapRequest(model="other", token_ids=[1]))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_questions_by_the_engines_own_hashes_where_blocks_are_keyed_by_them(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    index = await open_redis_index(store, writer=True)
    chain = "external:default"
    made = record("s", "http://s:30000")
    await write(store, made.model_copy(update={"endpoint": made.endpoint.model_copy(update={"chain": chain})}))
    scope = Scope(MODEL, MODEL, None, "acme", chain)
    keys = external_chain([hash_text(value) for value in ENGINES_OWN[:2]])
    await index.put(ScopeUse(scope, BLOCK_SIZE, 1_024), "s", Tier.HBM, keys)
    clients = tmp_path / "clients.toml"
    clients.write_text(
        f'[clients.a]\nkeys = ["{hash_of(b"key-a")}"]\ntenants = ["acme"]\n'
        f'[clients.g]\nkeys = ["{hash_of(b"key-g")}"]\ntenants = ["globex"]\n'
    )
    async with running_index_server(valkey_url, grpc_port=0, clients_file=clients, control_port=0) as (_, port):
        acme, globex = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-g", "x-kvatlas-model": MODEL}
        assert await match(port, as_numbers(ENGINES_OWN), **acme) == [("http://s:30000", 2)]
        assert await match(port, as_text(ENGINES_OWN), **globex) == []
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await match(port, as_text(ENGINES_OWN))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
