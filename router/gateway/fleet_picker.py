"""Picks endpoints as `kvatlas router` does: the fleet's workers by cost, and pods without a publisher.

A completion or a chat goes where its prompt costs least. Any other request, and one whose prompt is unknown, goes to the
least loaded worker of its model. If it names no known model, it goes to a worker of any model, whose engine then reports the
error.
"""

import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.fleet.records import FleetRecord, KvConnector
from kvatlas.identity import Scope
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_router.admission.admission import Admission, RequestShed
from kvatlas_router.admission.queue import QueueFull, Wait
from kvatlas_router.disaggregation.kv_sources import fetch_fields, fetch_of, let_fetch
from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.ejection.avoidance import EnginesRest
from kvatlas_router.engine_objects.object_holders import ObjectHolders, ObjectUnknown
from kvatlas_router.gateway.asked_request import AdministrationPath, AskedRequest
from kvatlas_router.gateway.booked_request import BookedParts, BookedPrompt, BookedRequest, LeftBookings
from kvatlas_router.gateway.counters import GatewayCounters
from kvatlas_router.gateway.extension_objects import ExtensionObjects
from kvatlas_router.gateway.picker import Destination, PickedRequest, Refusal, RequestHead
from kvatlas_router.gateway.pool_pods import PoolPods
from kvatlas_router.gateway.sender import SenderTrust, SenderUnknown
from kvatlas_router.gateway.unpublished_pods import UnpublishedPods
from kvatlas_router.gateway.worker_addresses import Candidates, WorkerAddresses
from kvatlas_router.prompts.request_reader import UnknownModel
from kvatlas_router.proxy.client_request import ErrorKind
from kvatlas_router.proxy.engine_call import is_form
from kvatlas_router.proxy.headers import decision_header, queue_header
from kvatlas_router.proxy.reported_usage import usage_fields
from kvatlas_router.proxy.request_router import RequestRouter
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.tokens.text_request import TextRequest
from router_client.decision.selector import Selector
from router_client.errors import NoWorkers
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.transfer_protocol import replace_fields
from router_client.prompt import Prompt

_log = logging.getLogger("kvatlas_router.gateway")


@dataclass(frozen=True, slots=True)
class FleetPickerSettings:
    """`fallbacks`: number of additional endpoints for the gateway's retries. `ask_usage`: make streams report their usage to
    the picker. `tenant_header`: the fairness header, in lower case. `prefill_header`: passes the prefill worker's endpoint to
    an engine's sidecar; '' for none. `kv_source_header`: passes the worker to fetch KV from in the same way. `trust`: what
    the gateway vouches for about senders. `salts`: each tenant's requests get their own cache salt. `decisions`: explain the
    choice in a header of the answer."""

    fallbacks: int = 0
    ask_usage: bool = True
    tenant_header: str = ""
    prefill_header: str = ""
    kv_source_header: str = ""
    trust: SenderTrust = field(default_factory=SenderTrust)
    salts: bool = False
    decisions: bool = True


@dataclass(frozen=True, slots=True)
class _Read:
    """`text`: set for a completion or a chat, whose usage can be compared with the prediction."""

    prompt: RequestPrompt
    text: TextRequest | None


class FleetPicker:
    """See `EndpointPicker`."""

    def __init__(
        self,
        parts: RequestRouter,
        admission: Admission,
        pods: PoolPods,
        objects: ExtensionObjects,
        counters: GatewayCounters,
        settings: FleetPickerSettings | None = None,
    ) -> None:
        self._parts = parts
        self._admission = admission
        self._pods = pods
        self._objects = objects
        self._counters = counters
        self._settings = settings or FleetPickerSettings()
        self._unpublished = UnpublishedPods()
        self._left = LeftBookings()
        self._holders = ObjectHolders(parts.fleet, parts.catalogue.records)
        self._booked_parts = BookedParts(
            admission, parts.ejections, parts.progress, self._left, self._holders, self._book_served
        )
        self._log = RateLimitedLog(_log)
        self._records: Mapping[str, FleetRecord] = {}
        self._addresses = WorkerAddresses.of({}, parts.addresses)
        self._members = pods.endpoints
        self._candidates = self._addresses.among(self._members)
        self._has_models = False

    async def close(self) -> None:
        """End the bookings of requests whose answers bypass the picker."""
        await self._left.close()

    def ready_endpoints(self) -> int:
        """Number of endpoints that may get requests, as last read."""
        routable = {at for id, at in self._addresses.endpoints.items() if self._records[id].routable}
        pool = self._pods.endpoints
        if pool is None:
            return len(routable)
        return len(self._addresses.among(pool).unpublished) + len(routable & set(pool))

    def wants_body(self, head: RequestHead) -> bool:
        """True if the body matters. A form matters only if there are several models, because it names one of them."""
        reads = self._has_models or not is_form(head.path, head.first(b"content-type") or "")
        return reads and head.method in ("POST", "PUT", "PATCH")

    async def pick(self, head: RequestHead, body: bytes | None, *, may_hide_usage: bool) -> PickedRequest | Refusal:
        """See `EndpointPicker`."""
        failure = ""
        try:
            await self._read_addresses()
        except Unreachable as error:  # the fleet has never been read
            failure = str(error)
        try:
            asked = await AskedRequest.read(
                head,
                body,
                self._objects.current,
                self._settings.trust,
                fairness_header=self._settings.tenant_header,
                salts=self._settings.salts,
            )
        except SenderUnknown as error:
            self._counters.invalid += 1
            return Refusal(ErrorKind.FOREIGN, str(error), None)
        except AdministrationPath as error:
            self._counters.invalid += 1
            return Refusal(ErrorKind.NO_PATH, str(error), None)
        except InvalidValue as error:
            self._counters.invalid += 1
            return Refusal(ErrorKind.INVALID, str(error), None)
        candidates = self._candidates_of(head)
        if asked.caller.is_proven:  # it is not known which tenants' prompts a pod without a publisher may see
            candidates = candidates._replace(unpublished=())
        if asked.objects is not None and not candidates.unpublished:
            try:
                holder = await self._holders.find(asked.objects, candidates.workers, asked.caller.tenant_id)
            except Unreachable as error:
                self._counters.refused += 1
                return Refusal(ErrorKind.UNAVAILABLE, str(error))
            except (ObjectUnknown, InvalidValue) as error:
                self._counters.invalid += 1
                kind = ErrorKind.NO_OBJECT if isinstance(error, ObjectUnknown) else ErrorKind.INVALID
                return Refusal(kind, str(error), None)
            if holder is not None:
                candidates = Candidates(frozenset((holder.endpoint.id,)))
        if not self._prefers_unpublished(candidates):
            picked = await self._pick_worker(asked, candidates, may_hide_usage=may_hide_usage)
            if not isinstance(picked, str):
                return picked
            failure = failure or picked
        if candidates.unpublished:
            self._counters.unpublished += 1
            self._log.report(
                "unpublished",
                f"{len(candidates.unpublished)} pods have no publisher, such as {candidates.unpublished[0]}; "
                "routing to them by prefix and this picker's load",
            )
            return self._unpublished.choose(asked, candidates.unpublished, self._settings.fallbacks)
        self._counters.refused += 1
        return Refusal(ErrorKind.UNAVAILABLE, failure)

    # ------------------------------------------------------------ candidates

    async def _read_addresses(self) -> None:
        records = await self._parts.catalogue.records()
        if records is self._records:
            return
        self._records, self._addresses = records, WorkerAddresses.of(records, self._parts.addresses)
        self._candidates = self._addresses.among(self._members)
        self._has_models = len({record.endpoint.pool_id for record in records.values()}) > 1
        self._counters.no_address += len(self._addresses.unusable)
        for worker_id, why in self._addresses.unusable.items():
            self._log.report(f"address of {worker_id}", f"worker {worker_id} gets no requests: {why}")

    def _candidates_of(self, head: RequestHead) -> Candidates:
        if head.subset is not None:
            return self._addresses.among(self._pods.endpoints, head.subset)
        if self._members is not self._pods.endpoints:
            self._members = self._pods.endpoints
            self._candidates = self._addresses.among(self._members)
        return self._candidates

    def _prefers_unpublished(self, candidates: Candidates) -> bool:
        """True for a random share of requests, in proportion to the pods without a publisher, whose load is unknown."""
        if not candidates.unpublished or candidates.workers is None:
            return False
        routable = sum(self._records[worker_id].routable for worker_id in candidates.workers)
        return random.random() * (routable + len(candidates.unpublished)) >= routable

    # ------------------------------------------------------------ workers

    async def _pick_worker(
        self, asked: AskedRequest, candidates: Candidates, *, may_hide_usage: bool
    ) -> PickedRequest | Refusal | str:
        """Pick a worker. If no worker can take the request, returns the reason as a text."""
        if candidates.workers is not None and not candidates.workers:
            return "none of the allowed endpoints belongs to a worker"
        try:
            wait = Wait()
            read, booked = await self._book(asked, candidates.workers, wait)
        except RequestShed as error:
            self._counters.shed += 1
            return Refusal(ErrorKind.BUSY, str(error), error.retry_after_s)
        except QueueFull as error:
            self._counters.queue_full += 1
            return Refusal(ErrorKind.BUSY, str(error), error.retry_after_s)
        except EnginesRest as error:
            self._counters.refused += 1
            return Refusal(ErrorKind.BUSY, str(error), error.retry_after_s)
        except (NoWorkers, Unreachable) as error:
            return str(error)
        choice = booked.choice
        endpoints = self._endpoints(choice)
        if not endpoints:  # the worker is newer than the addresses
            await self._admission.end(booked.prompt, choice)
            return f"worker {choice.worker_id} has no address that a gateway can use"
        if read.prompt.prompt_tokens is None:
            self._counters.by_load += 1
        else:
            self._counters.by_prompt += 1
        text, hides_usage = read.text, False
        fields: dict[str, Any] = {}
        if text is not None:
            hides_usage = may_hide_usage and self._settings.ask_usage and text.streamed and not text.wants_usage
            fields = dict(usage_fields(text)) if hides_usage else {}
            if self._told_source(choice) is None:
                fields |= fetch_fields(choice, text.body)
        changed = asked.changed
        if text is not None and fields:
            changed = replace_fields(text.body, asked.call.body, fields)
        told = [decision_header(choice, read.prompt, attempt=1), *([queue_header(wait)] if wait else [])]
        return BookedRequest(
            booked,
            Destination(endpoints, self._headers(choice), changed),
            text,
            self._booked_parts,
            asked=asked,
            answer_headers={n.decode(): v.decode() for n, v in told} if self._settings.decisions else {},
            hides_usage=hides_usage,
        )

    async def _book(
        self, asked: AskedRequest, workers: frozenset[str] | None, wait: Wait
    ) -> tuple[_Read, BookedPrompt]:
        """Raises what `Admission.admit` raises."""
        read = await self._read(asked, workers)
        try:
            return read, await self._admit(read, asked, workers, wait)
        except InvalidValue:  # an out-of-range token id, found only on hashing; the engine's error goes to the client
            read = self._guess(asked, workers)
            return read, await self._admit(read, asked, workers, wait)

    async def _admit(
        self, read: _Read, asked: AskedRequest, workers: frozenset[str] | None, wait: Wait
    ) -> BookedPrompt:
        among = _among(read.prompt.prompt, workers)
        choice = await self._admission.admit(
            among,
            read.text,
            lambda name: self._settings.trust.header(asked.head, name),
            tenant_id=asked.caller.tenant_id,
            priority=asked.priority,
            weight=asked.caller.weight,
            wait=wait,
        )
        return BookedPrompt(among, choice)

    def _endpoints(self, choice: Booked) -> Sequence[str]:
        """The chosen worker's endpoint, then those of the fallbacks; empty if the chosen worker has none."""
        known = self._addresses.endpoints
        first = known.get(choice.worker_id)
        prefill = choice.prefill if isinstance(choice, PairChoice) else None
        if first is None or (prefill is not None and prefill.worker_id not in known):
            return ()
        endpoints = {first: None}
        if self._settings.fallbacks:
            decode = choice.decode if isinstance(choice, PairChoice) else choice
            for result in decode.ranking:
                if (endpoint := known.get(result.worker_id)) is not None:
                    endpoints.setdefault(endpoint)
                if len(endpoints) > self._settings.fallbacks:
                    break
        return list(endpoints)

    def _headers(self, choice: Booked) -> Mapping[str, str]:
        """Headers for the engine, or for its sidecar, which makes the prefill worker compute the prompt."""
        headers, endpoints = dict(choice.headers), self._addresses.endpoints
        if isinstance(choice, PairChoice) and choice.prefill is not None:
            headers[self._settings.prefill_header] = endpoints[choice.prefill.worker_id]
        if (source := self._told_source(choice)) is not None:
            headers[self._settings.kv_source_header] = endpoints[source]
        return headers

    def _told_source(self, choice: Booked) -> str | None:
        """The worker to fetch KV from, if a header passes it to the engine's sidecar; None: if there is such a worker,
        the body names it."""
        fetch = fetch_of(choice)
        if not self._settings.kv_source_header or fetch is None or fetch.source.kv_connector is not KvConnector.P2P:
            return None
        return fetch.source.id if fetch.source.id in self._addresses.endpoints else None

    async def _book_served(self, prompt: Prompt, served: str) -> BookedPrompt | None:
        self._counters.served_elsewhere += 1
        worker_id = self._addresses.worker_at(served)
        if worker_id is None:
            return None
        among = _among(prompt, frozenset((worker_id,)))
        try:
            return BookedPrompt(among, await self._admission.book(among, None, apart=False))
        except (NoWorkers, EnginesRest, Unreachable):
            return None

    # ------------------------------------------------------------ prompts

    async def _read(self, asked: AskedRequest, workers: frozenset[str] | None) -> _Read:
        """Raises NoWorkers or Unreachable."""
        head, call = asked.head, asked.call
        request_id = head.first(b"x-request-id")
        try:
            if call.text is None:
                read = await self._parts.reader.read_length(call.model, call.letters, request_id, asked.caller)
            else:
                read = await self._parts.reader.read(call.text, request_id, asked.caller)
        except (UnknownModel, InvalidValue):
            return self._guess(asked, workers)
        read = self._parts.reader.with_session(read, head.headers)
        # the body goes to the decode worker, so only a header can tell its sidecar what the prefill worker should fetch
        if self._settings.kv_source_header or not self._settings.prefill_header:
            read = let_fetch(read, call.text)
        return _Read(read, call.text)

    def _guess(self, asked: AskedRequest, workers: frozenset[str] | None) -> _Read:
        """A prompt that matches nothing, for any model. Raises NoWorkers."""
        scope = self._any_scope(workers, asked.caller.tenant_id)
        return _Read(
            self._parts.reader.guess(scope, asked.call.letters, asked.head.first(b"x-request-id"), asked.caller), None
        )

    def _any_scope(self, workers: frozenset[str] | None, tenant_id: str | None) -> Scope:
        """The scope of the model that a random candidate serves, among those that may see the tenant's prompts. Raises
        NoWorkers."""
        tenant_id = tenant_id or self._parts.catalogue.tenant_id
        ids = self._addresses.endpoints if workers is None else workers
        records = [self._records[worker_id] for worker_id in ids]
        routable = [one.endpoint for one in records if one.routable and one.may_see(tenant_id)]
        if not routable:
            raise NoWorkers(f"none of {len(ids)} workers can take requests now")
        pools = Counter((endpoint.model_id, endpoint.tokenizer_id) for endpoint in routable)
        ((model_id, tokenizer_id),) = random.choices(list(pools), list(pools.values()))
        return Scope(model_id, tokenizer_id, None, tenant_id)


def _among(prompt: Prompt, workers: frozenset[str] | None) -> Prompt:
    """The prompt, restricted to these workers; None: unchanged."""
    if workers is None:
        return prompt
    return replace(prompt, select=replace(prompt.select or Selector(), allow=workers))
