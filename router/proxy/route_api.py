"""`/kvatlas/route` and `/kvatlas/done`: the proxy's choice for routers in other languages, which send requests themselves.
`/kvatlas/select`: the choice in the router protocol's terms, without a booking."""

from collections.abc import Mapping
from typing import Any

from kvatlas.errors import InvalidValue
from kvatlas_router.admission.admission import RequestShed
from kvatlas_router.disaggregation.bootstrap import DEFAULT_PORT
from kvatlas_router.disaggregation.kv_sources import fetch_of, let_fetch
from kvatlas_router.ejection.avoidance import Avoidance
from kvatlas_router.ejection.monitor import EjectionMonitor
from kvatlas_router.held_bookings import BookingId, HeldBookings
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import RequestReader
from kvatlas_router.prompts.route_body import RouteBodyReader
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.tokens.text_request import TextRequest
from kvatlas_router.upstream.status_verdict import Verdict, judge
from router_client.client import RouterClient
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.slo import Advice
from router_client.pricing.transfer_protocol import TransferProtocol
from router_client.results import Choice


class RouteApi:
    """Takes and returns JSON objects. Any router of the fleet can end another router's booking."""

    def __init__(
        self,
        held: HeldBookings,
        client: RouterClient,
        reader: RequestReader,
        catalogue: Catalogue,
        ejections: EjectionMonitor,
        counters: ProxyCounters,
        *,
        shed: bool = False,
    ) -> None:
        """`shed`: refuse a request when the choice advises it."""
        self._held = held
        self._client = client
        self._bodies = RouteBodyReader(reader, catalogue)
        self._ejections = ejections
        self._avoidance = Avoidance(ejections, catalogue.workers_of)
        self._counters = counters
        self._shed = shed

    async def route(self, body: dict[str, Any], caller: Caller) -> Mapping[str, Any]:
        """Choose and book a worker for a request that the caller sends.

        The body is an OpenAI request (with `messages` or `prompt`), or the hints of `kvatlas.request.RequestHints`, with these
        additions. `avoid`: workers that must not be chosen. `pd`: true to also get a separate prefill worker, if there is one.
        `fetch`: true if the caller will add the fields that name a source of KV. `caller`: may hold a limited number of
        bookings; its tenant is also the request's.

        Raises InvalidValue, UnknownModel, NoWorkers, EnginesRest, RequestShed, TooManyHeld or Unreachable.
        """
        pd = body.pop("pd", False)
        if not isinstance(pd, bool):
            raise InvalidValue(f"pd is {pd!r:.80}; expected true or false")
        fetch = body.pop("fetch", False)
        if not isinstance(fetch, bool):
            raise InvalidValue(f"fetch is {fetch!r:.80}; expected true or false")
        avoid = body.pop("avoid", [])
        if not isinstance(avoid, list) or not all(isinstance(one, str) for one in avoid):
            raise InvalidValue(f"avoid is {avoid!r:.80}; expected a list of worker ids")
        read, text = await self._bodies.read(body, caller)
        if fetch:
            read = let_fetch(read, text)
        held_id, choice = await self._avoidance.choose(
            read.prompt,
            frozenset(avoid),
            lambda avoided: self._held.book(read.prompt, avoided, pd=pd, client=caller.name),
        )
        if self._shed and choice.advice is Advice.SHED:
            self._held.end(held_id, None, well=False)
            self._counters.shed += 1
            raise RequestShed(choice.retry_after_s)
        self._ejections.record_sent(read.prompt.scope.pool_id, choice.worker_id)
        return _choice_json(held_id, choice, read, text)

    async def select(self, body: dict[str, Any], caller: Caller) -> Mapping[str, Any]:
        """Choose a worker for the router protocol's request: `tokens`, and any other hint, such as `model_id`.

        The answer is the protocol's selection result. `worker_id` is a number, as in the protocol, if the worker's id is one;
        otherwise text. Nothing is booked, since the protocol does not report a request's end. Raises what `route` raises.
        """
        if "tokens" not in body:
            raise InvalidValue("tokens is missing; expected a list of token ids")
        tokens = body.pop("tokens")
        try:
            read, _ = await self._bodies.read({**body, "token_ids": tokens}, caller)
        except InvalidValue as error:
            raise InvalidValue(str(error).replace("token_ids", "tokens")) from error
        choice = await self._avoidance.choose(
            read.prompt, frozenset(), lambda avoided: self._client.reserve(read.prompt, avoid=avoided, dry_run=True)
        )
        chosen = next((one for one in choice.ranking if one.worker_id == choice.worker_id), None)
        return {
            "worker_id": _number_or_text(choice.worker_id),
            "required_blocks": chosen.required_blocks if chosen is not None else 0,
            "overlap_blocks": chosen.overlap_blocks if chosen is not None else 0,
        }

    async def done(self, body: dict[str, Any], _: Caller) -> Mapping[str, Any]:
        """End a booking, or report its first token.

        `id`: the id that `/kvatlas/route` returned. `phase`: `first_token` or `done` (default). `usage`: taken from the
        engine's answer. `status`: the answer's HTTP status, 200 by default; 0 if there was no answer. `failed`: true if the
        request failed in another way. `timings`: the measured `ttft_us` and `tpot_us` (the median). Raises InvalidValue, or
        Unreachable for another router's booking.
        """
        held_id, phase, status = body.get("id"), body.get("phase", "done"), body.get("status", 200)
        if not isinstance(held_id, str):
            raise InvalidValue(f"id is {held_id!r:.80}; expected the id from /kvatlas/route")
        if phase not in ("first_token", "done"):
            raise InvalidValue(f"phase is {phase!r:.80}; expected first_token or done")
        if isinstance(status, bool) or not isinstance(status, int):
            raise InvalidValue(f"status is {status!r:.80}; expected an HTTP status, or 0 without an answer")
        if phase == "first_token":
            return {"known": await self._held.first_token(held_id)}
        usage, timings = Usage.of(body), Timings.of(body)
        well = body.get("failed") is not True and judge(status) is Verdict.ANSWERED
        known = self._held.end(held_id, usage, timings, well=well)
        if not known and (known := await self._held.end_elsewhere(held_id, well=well)):
            self._counters.done_elsewhere += 1
        if known:
            self._record(held_id, status, well=well)
        return {"known": known}

    def _record(self, held_id: str, status: int, *, well: bool) -> None:
        """Record what the request's end says about the worker."""
        booking = BookingId.parse(held_id)
        if booking is None or not booking.pool_id:
            return
        if well:
            self._ejections.record_good(booking.pool_id, booking.worker_id)
            self._ejections.record_complete(booking.pool_id, booking.worker_id)
        elif status == 0 or judge(status) is Verdict.ELSEWHERE:
            why = f"status {status}" if status else "no answer"
            self._ejections.record_bad(booking.pool_id, booking.worker_id, why, unreachable=not status)
        else:
            self._ejections.record_unknown(booking.pool_id, booking.worker_id)


def _number_or_text(worker_id: str) -> int | str:
    """A worker's id as a signed 64-bit number, if it is written as one."""
    try:
        number = int(worker_id)
    except ValueError:
        return worker_id
    return number if str(number) == worker_id and -(1 << 63) <= number < 1 << 63 else worker_id


def _choice_json(
    held_id: str, choice: Choice | PairChoice, read: RequestPrompt, text: TextRequest | None
) -> dict[str, Any]:
    return {
        "id": held_id,
        "worker": choice.worker_id,
        "url": choice.url,
        "headers": dict(choice.headers),
        "prompt_tokens": read.prompt_tokens,
        "predicted_cached_tokens": choice.predicted_cached_tokens,
        "unconfirmed_tokens": choice.unconfirmed_tokens,
        "score_us": choice.score_us,
        "ttft_us": choice.ttft_us,
        "by": choice.mode,
        "advice": choice.advice,
        "explanation": choice.explain(),
        "notes": list(read.prompt.notes),
        "fetch": _fetch_json(choice, text),
        **({"prefill": _prefill_json(choice)} if isinstance(choice, PairChoice) else {}),
    }


def _fetch_json(choice: Choice | PairChoice, text: TextRequest | None) -> dict[str, Any] | None:
    """The fetch by the worker that computes the prompt: the source, and the request's fields that name it."""
    fetch = fetch_of(choice)
    if fetch is None:
        return None
    return {
        "source": fetch.source.id,
        "tokens": fetch.tokens,
        "fields": fetch.fields({} if text is None else text.body),
    }


def _prefill_json(pair: PairChoice) -> dict[str, Any] | None:
    """The prefill worker; None if the answering worker computes the prompt too."""
    prefill = pair.prefill
    if prefill is None:
        return None
    protocol = TransferProtocol.of(prefill.kind)
    meets = protocol is TransferProtocol.BOOTSTRAP
    return {
        "worker": prefill.worker_id,
        "url": prefill.url,
        "headers": dict(prefill.headers),
        "protocol": None if protocol is None else protocol.value,
        "bootstrap_port": (prefill.bootstrap_port or DEFAULT_PORT) if meets else None,
    }
