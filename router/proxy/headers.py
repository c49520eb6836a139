"""Selects the headers that are forwarded to engines and back, and builds the decision header."""

import re
from collections.abc import Mapping, Sequence

from kvatlas_router.admission.queue import Wait
from kvatlas_router.disaggregation.kv_sources import fetch_of
from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.tenancy.withheld_fields import HEADERS as TENANTS_HEADERS
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.slo import Advice
from router_client.pricing.transfer_protocol import WITHHELD_HEADERS
from router_client.results import fell_open_for_want_of

DECISION_HEADER = "X-KVAtlas-Decision"
QUEUE_HEADER = "X-KVAtlas-Queue"

RawHeaders = Sequence[tuple[bytes, bytes]]

# headers of one connection (RFC 9110, 7.6.1), and those that each sender sets itself
_OWN = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
# a client's own rank would lead to a worker other than the booked one.
# bodies with an encoding are refused, so a remaining `content-encoding` says `identity`
_REQUEST_OWN = {
    *_OWN,
    b"host",
    b"content-length",
    b"accept-encoding",
    b"content-encoding",
    b"expect",
    *(name.encode() for name in WITHHELD_HEADERS),
}
_JSON = b"application/json"
_JSON_TYPE = re.compile(rb"\s*application/(?:[\w.-]+\+)?json\s*", re.IGNORECASE)
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CREDENTIALS = {b"authorization", b"cookie", b"x-api-key", b"api-key"}
_ANSWER_OWN = {
    *_OWN,
    b"content-length",
    b"date",
    b"server",
    b"set-cookie",
}
_OUR_PREFIX = b"x-kvatlas-"
_LEFT_OUT = {
    (credentials, of_tenant): frozenset(
        _REQUEST_OWN | (set() if credentials else _CREDENTIALS) | (TENANTS_HEADERS if of_tenant else set())
    )
    for credentials in (False, True)
    for of_tenant in (False, True)
}


def for_engine(
    headers: RawHeaders, added: Mapping[str, str], *, credentials: bool, of_tenant: bool = False
) -> list[tuple[bytes, bytes]]:
    """A request's headers for an engine. `added` replace those of the same name. `credentials`: keep the client's credentials.
    `of_tenant`: leave out what tenants' clients may not say. Headers that only routers read (hints, a tenant) never reach an
    engine.

    Control characters become spaces (RFC 9110, 5.5): HTTP clients refuse to send them.
    """
    extra = {name.lower().encode(): value.encode() for name, value in added.items()}
    left_out = _LEFT_OUT[credentials, of_tenant]
    if also := extra.keys() | _named_by_connection(headers):
        left_out |= also
    kept = [
        (name, _CONTROLS.sub(b" ", value))
        for name, value in headers
        if (lower := name.lower()) not in left_out and not lower.startswith(_OUR_PREFIX)
    ]
    # the proxy reads answers, so they must not be compressed
    return [*kept, (b"accept-encoding", b"identity"), *extra.items()]


def plain_json_type(headers: RawHeaders) -> RawHeaders:
    """The headers, with any JSON content type in the spelling that every engine knows. They have at most one content type."""
    if (b"content-type", _JSON) in headers:
        return headers
    return [
        (name, _JSON) if name == b"content-type" and _JSON_TYPE.fullmatch(value.partition(b";")[0]) else (name, value)
        for name, value in headers
    ]


def for_client(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """An engine's headers for the client; the sender sets the length. An engine may neither speak for the router nor set
    cookies for the router's address, which all engines share."""
    left_out = _ANSWER_OWN
    if named := _named_by_connection(headers):
        left_out = left_out | named
    return [
        (lower, value)
        for name, value in headers
        if (lower := name.lower()) not in left_out and not lower.startswith(_OUR_PREFIX)
    ]


def decision_header(choice: Booked, read: RequestPrompt, *, attempt: int) -> tuple[bytes, bytes]:
    """The decision as one header. It is a structured field (RFC 9651): the worker, with parameters.

    `prefill`: a separate worker that computes the prompt, if any. `cached`: tokens that the engine computing the prompt should
    find cached; `fetched`: how many of these it should fetch from the worker `source`; `unconfirmed`: how many of these have
    not been confirmed by any event, absent if none. `prompt`: the number of prompt tokens; if unknown, `untokenized` gives the
    reason instead (`media`: only the tokens before the first image are known). `attempt`: 1 for the first worker tried. `by`:
    the basis of the choice; `open`: which parts did not answer in time for it, absent if all did. `cost-us`: the expected cost;
    `ttft-us`: its part up to the first token. `advice`: `queue` or `shed`, absent if an engine has room and meets the SLO.
    """
    prefill, decider = (choice.prefill, choice.decode) if isinstance(choice, PairChoice) else (None, choice)
    parts = [f'"{choice.worker_id}"', f"cached={choice.predicted_cached_tokens}"]
    if prefill is not None:
        parts.append(f'prefill="{prefill.worker_id}"')
    if (fetch := fetch_of(choice)) is not None:
        parts.append(f'source="{fetch.source.id}";fetched={fetch.tokens}')
    if choice.unconfirmed_tokens:
        parts.append(f"unconfirmed={choice.unconfirmed_tokens}")
    parts.append(f"untokenized={read.untokenized}" if read.prompt_tokens is None else f"prompt={read.prompt_tokens}")
    parts += [
        f"attempt={attempt}",
        f"by={choice.mode}",
        *([f"open={lacked}"] if (lacked := fell_open_for_want_of(decider)) else []),
        f"cost-us={choice.score_us}",
        *([] if choice.ttft_us is None else [f"ttft-us={choice.ttft_us}"]),
    ]
    if choice.advice is not Advice.GO:
        parts.append(f"advice={choice.advice}")
    return DECISION_HEADER.lower().encode(), ";".join(parts).encode()


def queue_header(wait: Wait) -> tuple[bytes, bytes]:
    """A request's wait in the pool's queue as one header; see `Wait`."""
    return QUEUE_HEADER.lower().encode(), str(wait).encode()


def _named_by_connection(headers: RawHeaders) -> set[bytes]:
    values = [value for name, value in headers if name.lower() == b"connection"]
    return {part.strip().lower() for value in values for part in value.split(b",")} if values else set()
