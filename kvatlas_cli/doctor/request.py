"""Follows one prompt from its scope to the blocks that each worker holds, to explain its overlap."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from kvatlas.bus.access import NatsAccess
from kvatlas.engine_access import NO_KEY, EngineAccess
from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.fleet.records import EngineKind, FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope, scope_from_canonical
from kvatlas.index.redis.keys import SCOPES
from kvatlas.index.redis.shard_reader import read_hash
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import Store, connected_store
from kvatlas_cli.doctor.finding import Finding, Level, join_names
from kvatlas_cli.doctor.heartbeats import Heard, Told, hear_workers
from kvatlas_cli.output import count_text
from kvatlas_cli.token_input import read_json_or_tokens
from router_client import (
    Fallbacks,
    NoWorkers,
    Prompt,
    PromptOverlap,
    RequestHints,
    RouterClient,
    RouterSettings,
    WorkerOverlap,
)

MOST_WORKERS = 8
"""Maximum number of workers that are listed individually, best first."""
MOST_SCOPES = 64
"""Maximum number of other scopes in which the prompt is looked up."""

_CHAT, _COMPLETION = "messages", "prompt"


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """A request from a file: token ids, a router's hints, or the body of an OpenAI call."""

    source: str
    content: Any

    @property
    def body(self) -> Mapping[str, Any] | None:
        """The body of an OpenAI call; None if it is not such a call."""
        has = isinstance(self.content, dict) and (_CHAT in self.content or _COMPLETION in self.content)
        return self.content if has else None

    @property
    def model(self) -> str | None:
        """The model that an OpenAI call names."""
        name = (self.body or {}).get("model")
        return name if isinstance(name, str) and name else None


def read_request(source: str) -> AskedRequest:
    """Read a file, or stdin for `-`. Raises InvalidValue, whose message names the file."""
    return AskedRequest(source, read_json_or_tokens(source, "--request"))


class RequestFollower:
    """Follows one request through a store. `heard`: the publishers' reports. `access`: credentials for engines."""

    def __init__(self, store: Store, router: RouterClient, heard: Heard, access: EngineAccess = NO_KEY) -> None:
        self._access = access
        self._store = store
        self._router = router
        self._heard = heard.heartbeats
        self._statuses = heard.statuses

    async def follow(self, request: AskedRequest, scope: Scope | None, tenant_id: str) -> list[Finding]:
        """Follow the request. `scope`: taken from the flags, for a request that names no model. Raises Unreachable, or
        InvalidValue for an invalid request."""
        fleet = await FleetStore(self._store).all()
        named = request.model or (scope.model_id if scope is not None else None)
        if request.model is not None and scope is None:
            scope = Scope(*self._pool_of(request.model, fleet), None, tenant_id)
        prompt = await self._prompt_of(request, scope, fleet)
        if isinstance(prompt, Finding):
            return [prompt]
        found = [_describe_prompt(prompt, named)]
        pool = [record for record in fleet.values() if record.endpoint.pool_id == prompt.scope.pool_id]
        if not pool:
            return [*found, self._judge_model(prompt.scope, fleet)]
        found.append(Finding("request.pool", Level.OK, f"{count_text(len(pool), 'worker')} of its model and tokenizer"))
        scopes = await self._registered()
        found.append(_judge_scope(prompt.scope, scopes))
        overlap = await self._router.overlap(prompt)
        found += [Finding("request.blocks", Level.WARNING, line) for line in overlap.remarks]
        found += self._judge_workers(prompt, overlap, fleet)
        if not any(worker.resident_tokens for worker in overlap):
            found += await self._look_elsewhere(prompt, scopes)
        found.append(await self._choose(prompt))
        return found

    # ---------------------------------------------------------------- the request

    def _pool_of(self, name: str, fleet: Mapping[str, FleetRecord]) -> tuple[str, str]:
        """The model and tokenizer that a request's name stands for: the fleet's model of that name, or else the model of a
        worker whose engine serves that name, or else the name itself for both."""
        for record in fleet.values():
            if record.endpoint.model_id == name:
                return name, record.endpoint.tokenizer_id
        for one in self._heard.values():
            if name in one.served_names:
                return one.endpoint.model_id, one.endpoint.tokenizer_id
        return name, name

    async def _prompt_of(
        self, request: AskedRequest, scope: Scope | None, fleet: Mapping[str, FleetRecord]
    ) -> Prompt | Finding:
        content = request.content
        if request.body is not None:
            if scope is None:
                raise InvalidValue(f"--request {request.source}: it names no model; add one, or --model-id")
            return await self._prompt_of_call(request.body, scope, fleet)
        if isinstance(content, dict):
            known = Fallbacks() if scope is None else _fallbacks(scope)
            return Prompt.of_hints(RequestHints.parse(content), known)
        if scope is None:
            raise InvalidValue(f"--request {request.source}: it has only token ids; add --model-id")
        return Prompt.of_tokens(scope, content)

    async def _prompt_of_call(
        self, body: Mapping[str, Any], scope: Scope, fleet: Mapping[str, FleetRecord]
    ) -> Prompt | Finding:
        """The prompt of an OpenAI call. One of the model's engines tokenizes its text."""
        from json import dumps

        from kvatlas_router.tokens.budget import BudgetedTokenizer, TokenizerBudget
        from kvatlas_router.tokens.engine_tokenizer import EngineTokenizer
        from kvatlas_router.tokens.prompt_reader import PromptReader
        from kvatlas_router.tokens.text_request import Api, TextRequest
        from kvatlas_router.upstream.engine_addresses import AddressPolicy
        from kvatlas_router.upstream.engine_client import EngineClient

        text = TextRequest.parse(Api.CHAT if _CHAT in body else Api.COMPLETIONS, dumps(body).encode())
        members = [one.endpoint for one in fleet.values() if one.routable and one.endpoint.pool_id == scope.pool_id]
        urls = [one.url for one in members]
        if {one.kind for one in members} == {EngineKind.SGLANG}:
            text = replace(text, kind=EngineKind.SGLANG)

        async def engines(_: TextRequest) -> Sequence[str]:
            return [url.rstrip("/") for url in urls if url]

        addresses = AddressPolicy(("*",), near=True, access=self._access)
        addresses.update(fleet.values())
        async with EngineClient(addresses, timeout_s=2.0) as client:
            tokenizer = BudgetedTokenizer(EngineTokenizer(client, engines), TokenizerBudget(deadline_ms=2_000))
            read = await PromptReader(tokenizer).read(text, scope)
        if read.prompt_tokens is None and read.untokenized != "media" and urls:
            line = f"its token ids are unknown ({read.untokenized}): no engine of {scope.model_id} answered /tokenize"
            return Finding("request.tokens", Level.ERROR, line, "give the token ids instead of the text")
        return read.prompt

    # ---------------------------------------------------------------- the findings

    def _judge_model(self, scope: Scope, fleet: Mapping[str, FleetRecord]) -> Finding:
        endpoints = [record.endpoint for record in fleet.values()]
        tokenizers = sorted({one.tokenizer_id for one in endpoints if one.model_id == scope.model_id})
        if tokenizers:
            line = f"no worker serves model {scope.model_id} with tokenizer {scope.tokenizer_id}"
            nearest = _nearest(scope.tokenizer_id, tokenizers)
            return Finding("request.pool", Level.ERROR, f"{line}; {nearest}", "ask with the publishers' --tokenizer-id")
        models = {one.model_id for one in endpoints}
        models.update(name for one in self._heard.values() for name in one.served_names)
        line = f"no worker serves model {scope.model_id}"
        if not models:
            return Finding("request.pool", Level.ERROR, f"{line}: no worker is known", "see `kvatlas doctor`")
        advice = "ask for a model that is published, or start a publisher with this --model-id"
        return Finding("request.pool", Level.ERROR, f"{line}; {_nearest(scope.model_id, sorted(models))}", advice)

    def _judge_workers(
        self, prompt: Prompt, overlap: PromptOverlap, fleet: Mapping[str, FleetRecord]
    ) -> Iterator[Finding]:
        workers = list(overlap)
        for worker in workers[:MOST_WORKERS]:
            line = worker.explain()
            if worker.resident_tokens or worker.predicted_tokens:
                yield Finding("request.worker", Level.OK, line + self._where_it_ends(worker, prompt))
            else:
                yield Finding("request.worker", Level.INFO, f"{line}: {self._why_nothing(worker, prompt, fleet)}")
        if rest := workers[MOST_WORKERS:]:
            best = max(worker.usable_tokens for worker in rest)
            line = f"{count_text(len(rest), 'more worker')}, with up to {best} usable tokens"
            yield Finding("request.worker", Level.INFO, line)

    def _why_nothing(self, worker: WorkerOverlap, prompt: Prompt, fleet: Mapping[str, FleetRecord]) -> str:
        """The likeliest cause, in a few words."""
        if worker.why:
            return "so it can hold nothing of it"
        if (heard := self._heard.get(worker.worker_id)) is not None and heard.diagnoses:
            return f"its publisher says: {heard.diagnoses[0].seen} ({heard.diagnoses[0].cure})"
        endpoint = fleet[worker.worker_id].endpoint if worker.worker_id in fleet else None
        if endpoint is not None and endpoint.salt_is_tenant is False and endpoint.tenant_id != prompt.scope.tenant_id:
            return f"it publishes tenant {endpoint.tenant_id}, but the request is of tenant {prompt.scope.tenant_id}"
        if not worker.block_size:
            return "it has published no block yet"
        if prompt.input_tokens < worker.block_size:
            return f"the prompt is shorter than a block of {worker.block_size} tokens"
        never = f"it never stored the first {worker.block_size} tokens in this scope"
        return self._missing(worker.worker_id, never, f"{never}, or has evicted them")

    def _where_it_ends(self, worker: WorkerOverlap, prompt: Prompt) -> str:
        """Why the worker holds no more of the prompt; empty if it holds all of it."""
        full = prompt.input_tokens // worker.block_size if worker.block_size else 0
        if not worker.resident_blocks or worker.resident_blocks >= full:
            return ""
        never = f"block {worker.resident_blocks} (from token {worker.resident_tokens}) was never stored there"
        return f"; {self._missing(worker.worker_id, never, f'{never}, or was evicted')}"

    def _missing(self, worker_id: str, never: str, evicted: str) -> str:
        """Why a block is not held. It can't have been evicted if the worker has never removed a block, or has never stored
        one."""
        status = self._statuses.get(worker_id)
        if status is None:
            return evicted
        intake, counters = status.get("intake") or {}, status.get("counters") or {}
        if left_out := intake.get("left_out"):
            reason, count = max(left_out.items(), key=lambda one: one[1])
            return f"{never}; {count} blocks that its engine reported were left out ({reason}); it may be one of them"
        dropped = counters.get("clears") or counters.get("feed_started_over")
        gone = counters.get("blocks_removed") or (counters.get("blocks_stored") and dropped)
        return evicted if gone else never

    async def _look_elsewhere(self, prompt: Prompt, scopes: Sequence[Scope]) -> list[Finding]:
        """Look up the same tokens in other scopes, and without their first token."""
        found: list[Finding] = []
        for scope in [one for one in scopes if one != prompt.scope and one.chain == prompt.scope.chain][:MOST_SCOPES]:
            best = await self._best(replace(prompt, scope=scope))
            if best is not None:
                differs = ", ".join(_differences(prompt.scope, scope))
                line = f"{best.worker_id} holds {best.resident_tokens} tokens of it in another scope: {differs}"
                advice = "ask in the publishers' scope, or change what they publish"
                found.append(Finding("request.scope", Level.ERROR, line, advice))
        tokens = prompt.tokens
        if not found and tokens is not None and len(tokens) > 1 and not prompt.extra_keys:
            best = await self._best(replace(prompt, tokens=tokens[1:], input_tokens=prompt.input_tokens - 1, media=()))
            if best is not None:
                line = (
                    f"{best.worker_id} holds {best.resident_tokens} tokens of it without its first token, {tokens[0]}"
                )
                advice = "the tokenizers add different first tokens: let the engine tokenize (--tokenizer engine)"
                found.append(Finding("request.tokens", Level.ERROR, line, advice))
        return found

    async def _best(self, prompt: Prompt) -> WorkerOverlap | None:
        """The worker that holds the most of a prompt; None if none holds anything."""
        held = [worker for worker in await self._router.overlap(prompt) if worker.resident_tokens]
        return max(held, key=lambda worker: worker.resident_tokens) if held else None

    async def _choose(self, prompt: Prompt) -> Finding:
        try:
            choice = await self._router.reserve(prompt, dry_run=True)
        except NoWorkers as error:
            return Finding("request.choice", Level.ERROR, str(error), "see `kvatlas doctor` and `kvatlas workers`")
        line = f"{choice.worker_id} would be chosen: {', '.join(str(term) for term in choice.result.terms)}"
        return Finding("request.choice", Level.OK, line)

    async def _registered(self) -> Sequence[Scope]:
        """All scopes that have blocks which are published now or were recently."""
        return [scope_from_canonical(canonical) for canonical in (await read_hash(self._store, SCOPES)).values()]


async def follow_request(
    nats: NatsAccess,
    redis: RedisAccess,
    request: AskedRequest,
    scope: Scope | None,
    tenant_id: str,
    listen_s: float,
    on_step: Told,
    access: EngineAccess = NO_KEY,
) -> list[Finding]:
    """Follow a request step by step. Without NATS, publishers' reports are missing. Raises Unreachable if the store does not
    answer, or InvalidValue for an invalid request."""
    found: list[Finding] = []
    on_step(f"listening to heartbeats for {listen_s:g} s")
    try:
        heard = await hear_workers(nats, listen_s)
    except Unreachable as error:
        heard = Heard()
        found.append(
            Finding("nats.reachable", Level.WARNING, str(error), "without it, publishers' own findings are unknown")
        )
    on_step("looking the prompt up")
    settings = RouterSettings(deadline_ms=None)
    async with connected_store(redis, wait=False) as store, RouterClient.open(redis, settings, wait=False) as router:
        found += await RequestFollower(store, router, heard, access).follow(request, scope, tenant_id)
    return found


def _describe_prompt(prompt: Prompt, named: str | None) -> Finding:
    scope = prompt.scope
    alias = f" (asked for as {named})" if named not in (None, scope.model_id) else ""
    parts = [f"model {scope.model_id}{alias}", f"tokenizer {scope.tokenizer_id}", f"tenant {scope.tenant_id}"]
    if scope.adapter_id is not None:
        parts.append(f"adapter {scope.adapter_id}")
    is_read = bool(prompt.tokens or prompt.hashes)
    length = count_text(prompt.input_tokens, "token") if is_read else "unknown tokens"
    return Finding("request.prompt", Level.OK, f"prompt of {length}, {', '.join(parts)}")


def _judge_scope(scope: Scope, registered: Sequence[Scope]) -> Finding:
    if scope in registered:
        return Finding("request.scope", Level.OK, "blocks of its model, tokenizer, adapter and tenant are published")
    near = [one for one in registered if one.pool_id == scope.pool_id]
    if not near:
        return Finding("request.scope", Level.INFO, "no worker has published a block of its model yet")
    nearest = min(near, key=lambda one: len(list(_differences(scope, one))))
    line = f"no worker publishes blocks of its scope; the nearest has {', '.join(_differences(scope, nearest))}"
    return Finding("request.scope", Level.ERROR, line, "ask in the publishers' scope, or change what they publish")


def _differences(asked: Scope, other: Scope) -> Iterator[str]:
    """How another scope differs from the requested one."""
    for name in ("model_id", "tokenizer_id", "adapter_id", "tenant_id", "chain"):
        mine, theirs = getattr(asked, name), getattr(other, name)
        if mine != theirs:
            yield f"{name.removesuffix('_id')} {theirs or '(none)'} instead of {mine or '(none)'}"


def _nearest(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.4)
    return f"the nearest is {close[0]}" if close else f"there are {join_names(known)}"


def _fallbacks(scope: Scope) -> Fallbacks:
    return Fallbacks(scope.model_id, scope.tokenizer_id, scope.adapter_id, scope.tenant_id)
