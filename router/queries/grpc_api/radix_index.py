"""The radix index that SGLang's model gateway (SMG) asks which workers hold a prompt, given as block hashes.

    Subscribe   a stream of queries; each is answered by one match with its id, in any order. Any other query
                (for another model, or as raw text), and any query while the store is down, gets an empty match: the
                gateway then chooses by load.
    Publish     the gateway's guesses about where prompts are now, and its workers. They are acknowledged and not used, because
                publishers follow the engines' own events.

A query's hashes are `kvatlas.blocks.hashing.local_hash` of each full block, and a holder is a worker's address.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

from kvatlas.blocks.hashing import chain_of_local_hashes
from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas_router.queries.api import MOST_MATCHES, QueryApi
from kvatlas_router.queries.grpc_api.radix_index_pb2 import (
    BYTES,
    HolderScore,
    Interval,
    Keyspace,
    Match,
    PublishAck,
    Query,
    Update,
)
from kvatlas_router.queries.question import ANY_TENANT, Form, Question
from kvatlas_router.tenancy.caller import Caller

SERVICE = "radix_index.RadixIndex"
HASH_SCHEME = 1
MOST_BLOCKS = 16_384
"""The limit of SMG's own index."""
MOST_OUTSTANDING = 64
"""Maximum number of one stream's queries that are answered at the same time."""

Context = grpc.aio.ServicerContext[Any, Any]


class RadixIndex:
    """`caller`: proves who opened a stream; aborts it otherwise. `prove`: proves it again for one query, because a key
    may be withdrawn while the stream is open. `admitted`: admits one query of a caller within its limits."""

    def __init__(
        self,
        api: QueryApi,
        caller: Callable[[Context], Awaitable[Caller]],
        prove: Callable[[Context], Awaitable[Caller]],
        admitted: Callable[[Caller, Query], AbstractAsyncContextManager[None]],
    ) -> None:
        self._api = api
        self._caller = caller
        self._prove = prove
        self._admitted = admitted

    @property
    def handlers(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """The service's methods by name."""
        return {
            "Subscribe": grpc.stream_stream_rpc_method_handler(
                self._subscribe, Query.FromString, Match.SerializeToString
            ),
            "Publish": grpc.stream_stream_rpc_method_handler(
                self._publish, Update.FromString, PublishAck.SerializeToString
            ),
        }

    async def _subscribe(self, queries: AsyncIterator[Query], context: Context) -> None:
        await self._caller(context)
        room, writing = asyncio.Semaphore(MOST_OUTSTANDING), asyncio.Lock()

        async def answer(query: Query) -> None:
            try:
                match = Match(query_id=query.query_id, scores=await self._scores(query, context))
                async with writing:
                    await context.write(match)
            finally:
                room.release()

        async with asyncio.TaskGroup() as tasks:
            async for query in queries:
                await room.acquire()
                tasks.create_task(answer(query))

    async def _publish(self, updates: AsyncIterator[Update], context: Context) -> AsyncIterator[PublishAck]:
        await self._caller(context)
        async for update in updates:
            if not _is_served(update.keyspace):
                line = f"hash scheme {update.keyspace.hash_scheme}; expected {HASH_SCHEME}"
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, line)
            yield PublishAck(holder=update.holder, epoch=update.epoch, applied_seq=update.seq)

    async def _scores(self, query: Query, context: Context) -> Sequence[HolderScore]:
        try:
            with self._api.counters.question():
                caller = await self._prove(context)
                async with self._admitted(caller, query):
                    return await self._find(query, caller)
        except KvatlasError:
            return ()

    async def _find(self, query: Query, caller: Caller) -> Sequence[HolderScore]:
        keyspace, count = query.keyspace, len(query.content_hashes)
        if not _is_served(keyspace) or keyspace.symbol_kind == BYTES:
            raise InvalidValue(
                f"hash scheme {keyspace.hash_scheme} of {keyspace.symbol_kind}; expected tokens, {HASH_SCHEME}"
            )
        if not (keyspace.block_size and 0 < count <= MOST_BLOCKS):
            raise InvalidValue(
                f"{count} hashes of blocks of {keyspace.block_size} tokens; expected 1 to {MOST_BLOCKS} hashes and a block "
                "size above 0"
            )
        hashes = await asyncio.to_thread(chain_of_local_hashes, list(query.content_hashes))
        question = Question(
            Form.DYNAMO, keyspace.model, None, ANY_TENANT, None, hashes, keyspace.block_size, None, None
        )
        matches, _ = await self._api.find(await self._api.prompt_of(question, caller))
        blocks: dict[str, int] = {}
        for match in matches:  # deepest first: of an engine's ranks at one address, only the deepest is kept
            if match.endpoint.url and match.block_size == keyspace.block_size:
                blocks.setdefault(match.endpoint.url, match.held.tokens // keyspace.block_size)
        return [
            HolderScore(
                holder=address,
                matched_blocks=held,
                total_blocks=held,
                event_fed=True,
                intervals=[Interval(start=0, end=held)],
            )
            for address, held in list(blocks.items())[:MOST_MATCHES]
        ]


def _is_served(keyspace: Keyspace) -> bool:
    """True for the hash schemes that we know; 0 means the first one."""
    return keyspace.hash_scheme in (0, HASH_SCHEME)
