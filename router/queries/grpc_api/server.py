"""The gRPC server: our own service, and those that SGLang's two gateways call. Callers authenticate as over HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc

from kvatlas.blocks.external_chain import MAX_HASH, external_chain, hash_text
from kvatlas.blocks.hashing import HASH_BYTES, pack_hashes, unpack_hashes
from kvatlas.errors import InvalidValue, KvatlasError, SettingsError, Unreachable
from kvatlas.http.bounded_port import BoundedPort
from kvatlas.http.server import Listener
from kvatlas.identity import OWN_CHAIN
from kvatlas_router.prompts.request_reader import UnknownModel
from kvatlas_router.queries.api import MOST_MATCHES, QueryApi
from kvatlas_router.queries.changes.change import position_text, read_position
from kvatlas_router.queries.changes.follow import PositionLost
from kvatlas_router.queries.grpc_api.index_pb2 import Change as GrpcChange
from kvatlas_router.queries.grpc_api.index_pb2 import FollowRequest, Holder, OverlapRequest, OverlapResponse, Run
from kvatlas_router.queries.grpc_api.kv_indexer_pb2 import (
    ExternalKvPrefixMatch,
    MatchExternalKvPrefixRequest,
    MatchExternalKvPrefixResponse,
)
from kvatlas_router.queries.grpc_api.radix_index import SERVICE as SMG_SERVICE
from kvatlas_router.queries.grpc_api.radix_index import RadixIndex
from kvatlas_router.queries.question import ANY_TENANT, MAX_HASHES, MAX_TOKENS, Form, Question, check_length
from kvatlas_router.queries.question_body import copy_in_slices
from kvatlas_router.tenancy.caller import ANYBODY, Caller
from kvatlas_router.tenancy.entrance import Entrance
from kvatlas_router.tenancy.limits import OverLimit
from kvatlas_router.tenancy.refusals import ForeignTenant, KeysUnknown, Unproven

SERVICE = "kvatlas.index.v1.Index"
SGLANG_SERVICE = "kv_indexer.v1.KVIndexer"
MODEL_KEY = "x-kvatlas-model"
"""Metadata key for the model, since SGLang's queries don't name one. Without it, the fleet must serve only one
model."""
MOST_MESSAGE_BYTES = 3 * MAX_TOKENS
"""Token ids below 2^21 take at most 3 bytes. Longer messages would delay others while they are decoded."""
MOST_STREAMS = 64
"""Maximum concurrent calls per connection; the client holds back any further ones."""
LOST_S = 60
"""A client is pinged if it has sent nothing for this many seconds."""

_NUMBER = re.compile(rb"-?[0-9]{1,20}")
_STATUS: Mapping[type[KvatlasError], grpc.StatusCode] = {
    InvalidValue: grpc.StatusCode.INVALID_ARGUMENT,
    Unproven: grpc.StatusCode.UNAUTHENTICATED,
    ForeignTenant: grpc.StatusCode.PERMISSION_DENIED,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    OverLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    KeysUnknown: grpc.StatusCode.UNAVAILABLE,
    Unreachable: grpc.StatusCode.UNAVAILABLE,
}

Context = grpc.aio.ServicerContext[Any, Any]
Q = TypeVar("Q")
A = TypeVar("A")


class GrpcServer:
    """`port`: the bound port. `refused`: counts the connections that it refused."""

    def __init__(
        self,
        api: QueryApi,
        entrance: Entrance | None,
        listener: Listener,
        credentials: grpc.ServerCredentials | None,
    ) -> None:
        """`entrance=None`: all callers belong to the only tenant. `listener`: the port. `credentials=None`: plain
        text."""
        self._api = api
        self._entrance = entrance
        self._credentials = credentials
        self._door = BoundedPort(listener)
        self.refused = self._door.counters
        self.port: int = listener.socket.getsockname()[1]
        access = listener.access
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
                ("grpc.max_concurrent_streams", MOST_STREAMS),
                ("grpc.server_handshake_timeout_ms", round(access.header_s * 1_000)),
                ("grpc.max_connection_idle_ms", access.idle_s * 1_000),
                ("grpc.keepalive_time_ms", 1_000 * LOST_S),
            ]
        )
        own: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Overlap": grpc.unary_unary_rpc_method_handler(
                self._answering(self._overlap), OverlapRequest.FromString, OverlapResponse.SerializeToString
            ),
            "Follow": grpc.unary_stream_rpc_method_handler(
                self._follow, FollowRequest.FromString, GrpcChange.SerializeToString
            ),
        }
        sglang: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "MatchExternalKvPrefix": grpc.unary_unary_rpc_method_handler(
                self._answering(self._match),
                MatchExternalKvPrefixRequest.FromString,
                MatchExternalKvPrefixResponse.SerializeToString,
            )
        }
        smg = RadixIndex(api, self._proven_caller, self._caller, self._admitted).handlers
        services = ((SERVICE, own), (SGLANG_SERVICE, sglang), (SMG_SERVICE, smg))
        self._server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(name, methods) for name, methods in services)
        )

    async def start(self) -> None:
        """Serve. Raises SettingsError if the server can't be started."""
        try:
            if self._credentials is None:
                self._server.add_insecure_port(self._door.server_address)
            else:
                self._server.add_secure_port(self._door.server_address, self._credentials)
        except RuntimeError as error:
            raise SettingsError(f"the index server can't serve gRPC (--grpc-port): {error}") from error
        await self._server.start()
        await self._door.start()

    async def stop(self) -> None:
        """Stop. Running answers get one second."""
        await self._server.stop(1)
        await self._door.stop()

    def _answering(self, answer: Callable[[Q, Caller, Context], Awaitable[A]]) -> Callable[[Q, Context], Awaitable[A]]:
        """Wrap a handler so that each of its errors becomes a status with a one-line message."""

        async def handle(request: Q, context: Context) -> A:
            try:
                with self._api.counters.question():
                    caller = await self._caller(context)
                    async with self._admitted(caller, request):
                        return await answer(request, caller, context)
            except tuple(_STATUS) as error:
                await context.abort(_status_of(error), str(error))
                raise AssertionError from error  # abort raises

        return handle

    async def _proven_caller(self, context: Context) -> Caller:
        """The caller of a stream. If the caller proves nothing, the stream ends with a one-line error."""
        try:
            return await self._caller(context)
        except tuple(_STATUS) as error:
            await context.abort(_status_of(error), str(error))
            raise AssertionError from error  # abort raises

    async def _caller(self, context: Context) -> Caller:
        if self._entrance is None:
            return ANYBODY
        metadata = [(key.encode(), _to_bytes(value)) for key, value in context.invocation_metadata() or ()]
        return await self._entrance.prove(metadata, self._door.address_of(context.peer()))

    @asynccontextmanager
    async def _admitted(self, caller: Caller, request: Any) -> AsyncIterator[None]:
        """Admit one query of this caller within its limits. Raises OverLimit or InvalidValue."""
        if self._entrance is None:
            yield
            return
        most = caller.limits.body_bytes
        if most is not None and (size := request.ByteSize()) > most:
            line = f"the message has {size} bytes; expected at most {most}"
            self._entrance.count_too_long(caller, line)
            raise InvalidValue(line)
        permit = await self._entrance.admit_caller(caller)
        try:
            yield
        finally:
            permit.end()

    async def _overlap(self, request: OverlapRequest, caller: Caller, _: Context) -> OverlapResponse:
        given = [bool(request.token_ids), bool(request.hashes), bool(request.text)]
        if sum(given) != 1:
            raise InvalidValue("expected one of token_ids, hashes and text")
        check_length("token_ids", len(request.token_ids), MAX_TOKENS)
        check_length("hashes", len(request.hashes), MAX_HASHES)
        if request.text:
            body = {"model": request.model, "prompt": request.text}
            read = await self._api.read(
                body | ({"cache_salt": request.cache_salt} if request.cache_salt else {}), caller
            )
            prompt = read.prompt
        else:
            question = Question(
                Form.MOONCAKE,
                request.model,
                request.adapter or None,
                ANY_TENANT,
                await copy_in_slices(request.token_ids) or None,
                pack_hashes(list(request.hashes)),
                request.block_size or None,
                None,
                request.cache_salt or None,
            )
            prompt = await self._api.prompt_of(question, caller)
        matches, usable = await self._api.find(prompt)
        holders = [
            Holder(
                worker=match.endpoint.id,
                instance=match.instance,
                dp_rank=match.rank,
                url=match.endpoint.url,
                routable=match.record.routable,
                block_size=match.block_size,
                resident_tokens=match.held.tokens,
                usable_tokens=usable[match.endpoint.id],
                runs=[Run(tokens=run.tokens, tiers=[tier.label for tier in run.tiers]) for run in match.held.runs],
            )
            for match in matches[:MOST_MATCHES]
        ]
        return OverlapResponse(holders=holders)

    async def _follow(self, request: FollowRequest, context: Context) -> AsyncIterator[GrpcChange]:
        """Like `/kvatlas/changes`. gRPC itself notices if a client is lost, and waits for a slow one."""
        try:
            after = read_position(request.position) if request.position else None
            caller = await self._caller(context)
            again = partial(self._caller, context)
            async with self._admitted(caller, request), aclosing(self._api.follow(caller, after, again)) as changes:
                async for change in changes:
                    if change is not None:
                        position = "" if change.position is None else position_text(change.position)
                        yield GrpcChange(position=position, kind=change.kind, data=json.dumps(change.data))
        except PositionLost as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        except KvatlasError as error:
            await context.abort(_status_of(error), str(error))

    async def _match(
        self, request: MatchExternalKvPrefixRequest, caller: Caller, context: Context
    ) -> MatchExternalKvPrefixResponse:
        """Match by the engine's own hashes if the workers' blocks are keyed by them, otherwise by sequence hashes. Workers
        without an address are left out, since the gateway knows workers by their URLs."""
        model = next((_to_bytes(v).decode() for k, v in context.invocation_metadata() or () if k == MODEL_KEY), None)
        hashes = await asyncio.to_thread(read_hashes, request.hashes)
        if request.max_blocks:
            hashes = hashes[: request.max_blocks]
        scope, size, chain = await self._api.keyed_by(model, caller)
        own = chain == OWN_CHAIN
        packed = pack_hashes(hashes) if own else external_chain([hash_text(one) for one in hashes])
        matches, _ = await self._api.find(self._api.prompt_of_hashes(scope, packed, size, chain))
        found = [
            ExternalKvPrefixMatch(
                worker_address=match.endpoint.url,
                worker_id=match.endpoint.id,
                matched_prefix_blocks=match.held.tokens // size,
            )
            for match in matches[:MOST_MATCHES]
            if match.endpoint.url
        ]
        best = max((one.matched_prefix_blocks for one in found), default=0)
        return MatchExternalKvPrefixResponse(matches=found, best_prefix_blocks=best, blocks_read=len(hashes))


def read_hashes(fields: Sequence[bytes]) -> list[int]:
    """Hashes as text, one per field, or packed as 8 little-endian bytes each. Raises InvalidValue."""
    check_length("hashes", len(fields), MAX_HASHES)
    if all(map(_NUMBER.fullmatch, fields)):
        numbers = [int(field) for field in fields]
    else:
        packed = b"".join(fields)
        if len(packed) % HASH_BYTES:
            raise InvalidValue("hashes: expected 64-bit integers, packed or as text")
        numbers = unpack_hashes(packed)
    check_length("hashes", len(numbers), MAX_HASHES)
    if not numbers:
        raise InvalidValue("hashes is empty; expected at least one")
    return [number & MAX_HASH for number in numbers]


def _status_of(error: Exception) -> grpc.StatusCode:
    return next((code for kind, code in _STATUS.items() if isinstance(error, kind)), _STATUS[Unreachable])


def _to_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
