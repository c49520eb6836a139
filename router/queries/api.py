"""Answers one caller's queries. Takes and returns JSON objects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from typing import Any

from kvatlas.bus.partition_batch import Position
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import FleetRecord
from kvatlas.identity import Scope
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import UnknownModel
from kvatlas_router.prompts.route_body import RouteBodyReader
from kvatlas_router.queries.answers import dynamo_answer, mooncake_answer, own_answer
from kvatlas_router.queries.changes.change import Change, View
from kvatlas_router.queries.changes.follow import MOST_FOLLOWERS, MOST_OF_TENANT, ChangeStreams
from kvatlas_router.queries.counters import QueryCounters
from kvatlas_router.queries.holders import HolderQueries, Match
from kvatlas_router.queries.question import ANY_TENANT, ONLY_GROUP, Form, Question, check_length, read_question
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tenancy.refusals import ForeignTenant
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from router_client.prompt import Prompt

MOST_MATCHES = 1_000
PROVE_AGAIN_S = 10.0
"""How long a withdrawn key or an expired token may stay valid for a follower."""
MAX_HINT_TOKENS = 1 << 17
"""Maximum number of token ids in the prompt of hints, because all of their fields are checked in one go."""


Prove = Callable[[], Awaitable[Caller]]


class QueryApi:
    """`salt_is_tenant`: a query's cache salt is part of its tenant, not of its hashes."""

    def __init__(
        self,
        bodies: RouteBodyReader,
        catalogue: Catalogue,
        holders: HolderQueries,
        changes: ChangeStreams,
        *,
        salt_is_tenant: bool,
    ) -> None:
        self._bodies = bodies
        self._catalogue = catalogue
        self._holders = holders
        self._changes = changes
        self._salt_is_tenant = salt_is_tenant
        self.counters = QueryCounters()

    async def query(self, body: dict[str, Any], caller: Caller) -> Mapping[str, Any]:
        """Find the holders of a prompt of token ids, in Mooncake's or Dynamo's format. Raises InvalidValue, UnknownModel,
        ForeignTenant or Unreachable."""
        return await self._answer(await asyncio.to_thread(read_question, body, by_hash=False), caller)

    async def query_by_hash(self, body: dict[str, Any], caller: Caller) -> Mapping[str, Any]:
        """Like `query`, but for a prompt of block hashes."""
        return await self._answer(await asyncio.to_thread(read_question, body, by_hash=True), caller)

    async def overlap(self, body: dict[str, Any], caller: Caller) -> Mapping[str, Any]:
        """Find the holders of a prompt, given as an OpenAI request (`messages` or `prompt`) or as hints, as for
        `/kvatlas/route`. Raises whatever `read` raises."""
        read = await self.read(body, caller)
        scope = read.prompt.scope
        matches, usable = await self.find(read.prompt)
        return {
            "model_id": scope.model_id,
            "adapter_id": scope.adapter_id,
            "prompt_tokens": read.prompt_tokens,
            "untokenized": read.untokenized,
            "workers": own_answer(matches, usable, MOST_MATCHES),
            "left_out": max(0, len(matches) - MOST_MATCHES),
        }

    async def read(self, body: dict[str, Any], caller: Caller) -> RequestPrompt:
        """The prompt of an OpenAI request or of hints. Raises InvalidValue, UnknownModel or Unreachable."""
        if isinstance(tokens := body.get("token_ids"), list):
            check_length("token_ids", len(tokens), MAX_HINT_TOKENS)
        read, _ = await self._bodies.read(body, caller)
        scope = read.prompt.scope
        if not caller.may_use(scope.adapter_id or scope.model_id):
            raise UnknownModel(f"no worker serves model {scope.model_id[:200]!r}")
        return read

    async def find(self, prompt: Prompt) -> tuple[Sequence[Match], dict[str, int]]:
        """Find the prompt's holders, and how many tokens each one's engine would not have to compute again. Raises
        Unreachable."""
        matches = await self._holders.find(prompt)
        return matches, self._holders.usable_tokens(prompt, matches)

    async def prompt_of(self, question: Question, caller: Caller) -> Prompt:
        """The query's prompt. Raises InvalidValue, UnknownModel, ForeignTenant or Unreachable."""
        return await self._prompt(question, await self._scope(question, caller))

    async def keyed_by(self, model: str | None, caller: Caller) -> tuple[Scope, int, str]:
        """The scope of a model (None: the only one), the block size of its workers, and the hash chain that keys their blocks.
        Raises InvalidValue if the workers differ in block size or chain, UnknownModel, or Unreachable."""
        name = model or ""
        tenant_id = caller.tenant_id
        scope = await self._catalogue.scope_of(model, tenant_id or self._catalogue.tenant_id, seen_by=tenant_id)
        if scope is None or not caller.may_use(name or scope.model_id):
            raise UnknownModel(
                f"no worker serves model {name[:200]!r}" if name else "the fleet serves more than one model"
            )
        workers = await self._holders.workers(scope.pool_id, scope.tenant_id)
        shapes = {(one.endpoint.block_size, one.endpoint.chain) for one in workers if one.endpoint.block_size}
        if len(shapes) != 1:
            raise InvalidValue("the workers of this model have blocks of several sizes or chains, or none yet")
        ((size, chain),) = shapes
        assert size is not None
        return scope, size, chain

    def prompt_of_hashes(self, scope: Scope, hashes: bytes, block_size: int, chain: str) -> Prompt:
        """A prompt that consists of precomputed hashes from a chain."""
        return Prompt.of_hashes(replace(scope, chain=chain), hashes, block_size)

    async def workers(self, model: str | None, group: str | None, caller: Caller) -> Sequence[Mapping[str, Any]]:
        """The workers that may see the caller's prompts, in the format of Dynamo's indexer. Raises Unreachable."""
        if group not in (None, ONLY_GROUP):
            return []
        tenant_id = caller.tenant_id or self._catalogue.tenant_id
        records = sorted((await self._catalogue.records()).items())
        return [
            _worker(record)
            for _, record in records
            if record.may_see(tenant_id)
            and model in (None, record.endpoint.model_id)
            and caller.may_use(record.endpoint.model_id)
        ]

    async def follow(
        self, caller: Caller, after: Position | None, prove: Prove | None = None
    ) -> AsyncGenerator[Change | None, None]:
        """See `ChangeStreams.follow`. `prove`: proves again who the caller is, every so often while it follows; None: it does
        not have to prove anything.

        Once the caller is no longer the same, raises ForeignTenant or whatever `prove` raises."""
        tenant_id = caller.tenant_id or self._catalogue.tenant_id
        await self._catalogue.records()

        def sees(worker_id: str) -> bool:
            record = self._catalogue.known_records.get(worker_id)
            return record is None or record.may_see(tenant_id)

        view, share = View(tenant_id, caller.may_use, sees), MOST_OF_TENANT if caller.is_proven else MOST_FOLLOWERS
        proven_s = monotonic()
        async with aclosing(self._changes.follow(view, after, share=share)) as changes:
            async for change in changes:
                if prove is not None and monotonic() - proven_s >= PROVE_AGAIN_S:
                    if await prove() != caller:
                        raise ForeignTenant("what this client may see has changed; follow again")
                    proven_s = monotonic()
                self.counters.changes += change is not None
                yield change

    async def _answer(self, question: Question, caller: Caller) -> Mapping[str, Any]:
        matches = await self._holders.find(await self.prompt_of(question, caller))
        if question.form is Form.DYNAMO:
            return dynamo_answer(matches[:MOST_MATCHES])
        chosen = [match for match in matches if _is_asked(match, question)]
        return mooncake_answer(question.tenant, chosen[:MOST_MATCHES])

    async def _scope(self, question: Question, caller: Caller) -> Scope:
        own = caller.tenant_id or self._catalogue.tenant_id
        if question.tenant not in (ANY_TENANT, own):
            raise ForeignTenant("tenant_id names another tenant than the caller's; a body proves none")
        tenant_id: str | None = own
        if self._salt_is_tenant and question.salt is not None:
            tenant_id = caller.salted(question.salt) if caller.is_proven else question.salt
        name = question.adapter or question.model
        if caller.may_use(name):
            scope = await self._catalogue.scope_of(question.model, tenant_id, seen_by=caller.tenant_id)
        else:
            scope = None
        if scope is None:
            raise UnknownModel(f"no worker serves model {question.model[:200]!r}")
        if question.group != ONLY_GROUP:
            raise UnknownModel(f"no worker is in routing group {question.group[:200]!r}; all are in {ONLY_GROUP!r}")
        return replace(scope, adapter_id=question.adapter) if question.adapter is not None else scope

    async def _prompt(self, question: Question, scope: Scope) -> Prompt:
        if question.tokens is not None:
            salted = question.salt is not None and not self._salt_is_tenant
            keys = ((question.salt,),) if salted else None
            return Prompt.of_tokens(scope, question.tokens, extra_keys=keys)
        size = question.block_size or await self._only_block_size(scope)
        return Prompt.of_hashes(scope, question.hashes, size)

    async def _only_block_size(self, scope: Scope) -> int:
        sizes = {record.endpoint.block_size for record in await self._holders.workers(scope.pool_id, scope.tenant_id)}
        if len(known := sizes - {None}) > 1:
            raise InvalidValue("block_size is missing; the workers of this model have blocks of several sizes")
        return next(iter(known)) or 1 if known else 1


def _is_asked(match: Match, question: Question) -> bool:
    """True if the match fits the query: Mooncake asks for one block size, and possibly for one instance."""
    return question.block_size in (None, match.block_size) and question.instance in (None, match.instance)


def _worker(record: FleetRecord) -> Mapping[str, Any]:
    endpoint = record.endpoint
    return {
        "instance_id": Match.instance_of(endpoint),
        "worker": endpoint.id,
        "model_name": endpoint.model_id,
        "dp_rank": endpoint.dp_rank or 0,
        "block_size": endpoint.block_size,
        "url": endpoint.url,
        "status": "active" if record.routable else "inactive",
    }
