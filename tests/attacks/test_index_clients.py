"""One tenant tries to take more than its share of the index server, over every protocol."""

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import grpc
import httpx
import pytest
from anyio.abc import SocketStream

from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas_router.queries.changes import follow
from kvatlas_router.queries.grpc_api.index_pb2 import Change, FollowRequest, OverlapRequest, OverlapResponse
from kvatlas_router.queries.grpc_api.radix_index import SERVICE as SMG_SERVICE
from kvatlas_router.queries.grpc_api.radix_index_pb2 import Match
from kvatlas_router.queries.grpc_api.server import SERVICE
from tests.attacks.guarded_router import ACME, OTHER, bearer, clients_text
from tests.eventually import until
from tests.indexer.running_replica import running_replica
from tests.kvatlas.http.listener import read_to_end
from tests.router.proxy.engines import MODEL, record
from tests.router.queries.grpc_api.test_radix_index import ask, keyspace, query
from tests.router.queries.servers import TOKENS, hold, running_index_server, write

pytestmark = pytest.mark.anyio

PER_MINUTE = 4


async def test_a_clients_limits_hold_for_all_protocols_together(
    store: Store, valkey_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream of queries is no way around them, nor is a long list, which is refused before it is read."""
    index = await open_redis_index(store, writer=True)
    await write(store, record("b", "http://b:8000"))
    await hold(index, "b", TOKENS, scope=Scope(MODEL, MODEL, None, "other"))
    limits = f"requests_per_minute = {PER_MINUTE}\n        body_bytes = 100000"
    (tmp_path / "clients.toml").write_text(clients_text(other=limits))
    given = {"clients_file": tmp_path / "clients.toml", "control_port": 0, "grpc_port": 0}
    async with (
        running_index_server(valkey_url, **given) as (client, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        overlap: grpc.aio.UnaryUnaryMultiCallable[OverlapRequest, OverlapResponse] = channel.unary_unary(
            f"/{SERVICE}/Overlap",
            request_serializer=OverlapRequest.SerializeToString,
            response_deserializer=OverlapResponse.FromString,
        )

        async def refusal(key: str, request: OverlapRequest) -> tuple[grpc.StatusCode, str | None]:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await overlap(request, metadata=tuple(bearer(key).items()))
            return refused.value.code(), refused.value.details()

        for key, tokens, why in ((OTHER, 200_000, "bytes"), (ACME, 1_048_577, "entries")):
            code, line = await refusal(key, OverlapRequest(model=MODEL, token_ids=[1] * tokens))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and why in (line or "")
        assert "request of client other refused: the message has 200" in caplog.text
        used = await ask(port, *(query(number, keyspace()) for number in range(2)), **bearer(OTHER))
        assert [len(one) for one in used.values()] == [1, 1]
        for _ in range(PER_MINUTE - 2):
            (holder,) = (
                await overlap(OverlapRequest(model=MODEL, token_ids=TOKENS), metadata=tuple(bearer(OTHER).items()))
            ).holders
            assert holder.worker == "b"
        code, line = await refusal(OTHER, OverlapRequest(model=MODEL, token_ids=TOKENS))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "requests a minute" in (line or "")
        assert await ask(port, query(1, keyspace()), **bearer(OTHER)) == {1: []}
        question = {"model": MODEL, "token_ids": TOKENS}
        assert (await client.post("/query", json=question, headers=bearer(OTHER))).status_code == 429
        assert (await client.post("/query", json=question, headers=bearer(ACME))).status_code == 200


async def test_one_tenants_followers_leave_room_for_others(
    store: Store, valkey_url: str, fresh_nats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas_router.queries.api.MOST_OF_TENANT", 2)
    (tmp_path / "clients.toml").write_text(clients_text())
    given = {"clients_file": tmp_path / "clients.toml", "control_port": 0, "grpc_port": 0, "nats_url": fresh_nats}
    async with (
        running_replica(fresh_nats, valkey_url),
        running_index_server(valkey_url, **given) as (client, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        AsyncExitStack() as followers,
    ):
        path = "/kvatlas/changes"
        for _ in range(2):
            stream = await followers.enter_async_context(client.stream("GET", path, headers=bearer(OTHER)))
            assert stream.status_code == 200
        assert (await client.get(path, headers=bearer(OTHER))).status_code == 503
        call: grpc.aio.UnaryStreamMultiCallable[FollowRequest, Change] = channel.unary_stream(
            f"/{SERVICE}/Follow",
            request_serializer=FollowRequest.SerializeToString,
            response_deserializer=Change.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError, match="2 followers of this tenant"):
            await call(FollowRequest(), metadata=tuple(bearer(OTHER).items())).read()
        stream = await followers.enter_async_context(client.stream("GET", path, headers=bearer(ACME)))
        assert stream.status_code == 200
    assert follow.MOST_OF_TENANT < follow.MOST_FOLLOWERS


async def test_a_key_that_is_withdrawn_ends_what_goes_on_by_it(
    store: Store, valkey_url: str, fresh_nats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its followers over both protocols, and its stream of queries. Those of others continue."""
    monkeypatch.setattr("kvatlas_router.queries.api.PROVE_AGAIN_S", 0.1)
    file = tmp_path / "clients.toml"
    file.write_text(clients_text())
    given = {"clients_file": file, "control_port": 0, "grpc_port": 0, "nats_url": fresh_nats}
    async with (
        running_replica(fresh_nats, valkey_url),
        running_index_server(valkey_url, **given) as (client, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        AsyncExitStack() as streams,
        anyio.create_task_group() as tasks,
    ):
        index = await open_redis_index(store, writer=True)
        await write(store, record("b", "http://b:8000"))
        await hold(index, "b", TOKENS, scope=Scope(MODEL, MODEL, None, "other"))
        ended: list[str] = []

        async def read(name: str, stream: httpx.Response) -> None:
            async for _ in stream.aiter_raw():
                pass
            ended.append(name)

        for key in (OTHER, ACME):
            stream = await streams.enter_async_context(client.stream("GET", "/kvatlas/changes", headers=bearer(key)))
            assert stream.status_code == 200
            tasks.start_soon(read, key, stream)
        call: grpc.aio.UnaryStreamMultiCallable[FollowRequest, Change] = channel.unary_stream(
            f"/{SERVICE}/Follow",
            request_serializer=FollowRequest.SerializeToString,
            response_deserializer=Change.FromString,
        )
        followed = call(FollowRequest(), metadata=tuple(bearer(OTHER).items()))
        subscribe: grpc.aio.StreamStreamMultiCallable[bytes, Match] = channel.stream_stream(
            f"/{SMG_SERVICE}/Subscribe", request_serializer=None, response_deserializer=Match.FromString
        )
        asked = subscribe(metadata=tuple(bearer(OTHER).items()))

        async def scores() -> int:
            await asked.write(query(1, keyspace()))
            answer = await asked.read()
            assert isinstance(answer, Match)
            return len(answer.scores)

        assert await scores() == 1
        other = "[clients.other]\n"
        text = clients_text()
        file.write_text(text.replace(text[text.index(other) : text.index("[clients.watcher]")], ""))
        await until(lambda: ended == [OTHER], what="its follower ends", deadline_s=60)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in followed:
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await scores() == 0
        assert ended == [OTHER]
        tasks.cancel_scope.cancel()


GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"


async def test_one_address_does_not_take_all_connections_of_grpc(store: Store, valkey_url: str) -> None:
    await open_redis_index(store, writer=True)
    async with (
        running_index_server(valkey_url, grpc_port=0, http_connections=8) as (_, port),
        AsyncExitStack() as held,
        anyio.create_task_group() as tasks,
    ):
        assert port is not None
        closed: list[int] = []

        async def watch(number: int, stream: SocketStream) -> None:
            await read_to_end(stream)
            closed.append(number)

        for number in range(20):
            stream = await anyio.connect_tcp("127.0.0.1", port, local_host="127.0.0.2")
            tasks.start_soon(watch, number, await held.enter_async_context(stream))
        await until(lambda: len(closed) >= 14, what="those above the share are closed")
        assert await ask(port, query(1, keyspace())) == {1: []}
        await until(lambda: len(closed) == 20, what="those that never say a word are closed", deadline_s=60)
        async with await anyio.connect_tcp("127.0.0.1", port, local_host="127.0.0.2") as again:
            await again.send(GREETING)
            assert await again.receive()


async def test_an_idle_connection_of_grpc_is_closed(store: Store, valkey_url: str) -> None:
    await open_redis_index(store, writer=True)
    async with (
        running_index_server(valkey_url, grpc_port=0, http_keep_alive_s=1) as (_, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        await channel.channel_ready()
        with anyio.fail_after(60):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
