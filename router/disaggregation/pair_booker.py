"""Books a pair of workers for a request, or a single worker if that is cheaper, if the request can't be split, or if a split
has failed."""

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from kvatlas.fleet.records import FleetRecord, Role
from kvatlas_router.tokens.text_request import TextRequest
from router_client.client import RouterClient
from router_client.errors import NoWorkers
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.transfer_protocol import TransferProtocol
from router_client.prompt import Prompt
from router_client.results import Choice

Booked = Choice | PairChoice
"""A PairChoice always has a prefill worker here."""


class _Prefillers(NamedTuple):
    """A pool's prefill workers. `meet`: all of them meet their partners in rooms, as SGLang's workers do."""

    ids: frozenset[str]
    meet: bool


class PairBooker:
    """Books for the proxy. A pool without prefill workers costs one dictionary lookup."""

    def __init__(
        self, client: RouterClient, records: Callable[[], Awaitable[Mapping[str, FleetRecord]]], *, apart: bool = True
    ) -> None:
        """`records`: the fleet's records, the same object until they are read again. `apart=False`: never book a
        pair."""
        self._client = client
        self._records = records
        self._apart = apart
        self._seen: Mapping[str, FleetRecord] | None = None
        self._pools: dict[str, _Prefillers] = {}

    async def book(
        self,
        prompt: Prompt,
        text: TextRequest | None,
        avoid: frozenset[str],
        *,
        apart: bool = True,
        dry_run: bool = False,
    ) -> Booked:
        """Book a single worker or a pair. `apart=False`: book a pair only if no single worker is left. `text=None`: the
        request's prompt is not read. `dry_run`: book nothing. Raises NoWorkers, or whatever `RouterClient.reserve`
        raises."""
        prefillers = await self._prefillers_of(prompt.scope.pool_id)
        if prefillers is None:
            return await self._client.reserve(prompt, avoid=avoid, dry_run=dry_run)
        pairs = self._apart and text is not None and _can_go_apart(text, prefillers)
        if apart and pairs:
            return await self._book_pair(prompt, avoid, dry_run=dry_run)
        try:
            return await self._book_whole(prompt, avoid, prefillers.ids, dry_run=dry_run)
        except NoWorkers:
            if not pairs:
                raise
        return await self._book_pair(prompt, avoid, dry_run=dry_run)

    async def _book_pair(self, prompt: Prompt, avoid: frozenset[str], *, dry_run: bool) -> Booked:
        pair = await self._client.reserve_pd(prompt, avoid=avoid, dry_run=dry_run)
        return pair.decode if pair.prefill is None else pair

    async def _book_whole(
        self, prompt: Prompt, avoid: frozenset[str], prefillers: frozenset[str], *, dry_run: bool
    ) -> Choice:
        """Book one worker for the whole request. Decode workers may serve it too; prefill workers only if there is no other
        worker."""
        try:
            return (await self._client.reserve_pd(prompt, avoid=avoid | prefillers, dry_run=dry_run)).decode
        except NoWorkers:
            return await self._client.reserve(prompt, avoid=avoid, dry_run=dry_run)

    async def _prefillers_of(self, pool_id: str) -> _Prefillers | None:
        records = await self._records()
        if records is not self._seen:
            self._seen = records
            found: dict[str, list[FleetRecord]] = {}
            for record in records.values():
                if record.routable and record.endpoint.role is Role.PREFILL:
                    found.setdefault(record.endpoint.pool_id, []).append(record)
            self._pools = {id: _describe(members) for id, members in found.items()}
        return self._pools.get(pool_id)


def _describe(members: list[FleetRecord]) -> _Prefillers:
    protocols = {TransferProtocol.of(record.endpoint.kind) for record in members}
    return _Prefillers(frozenset(r.endpoint.id for r in members), protocols == {TransferProtocol.BOOTSTRAP})


def _can_go_apart(text: TextRequest, prefillers: _Prefillers) -> bool:
    """True if the request may be split. vLLM's prefill engine drops the KV after one decode request has read it, and the decode
    engine never computes the prompt; so requests that ask for several answers or for prompt log probabilities, or have several
    prompts, are not split. Only chats and completions can be split."""
    if not text.api.is_checked:
        return False
    return prefillers.meet or (text.prompts == 1 and text.choices == 1 and not text.cache_reading.prompt_logprobs)
