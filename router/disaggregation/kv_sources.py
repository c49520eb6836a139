"""Lets engines fetch KV from each other: decides which requests may be priced with a fetch, and names the source in
them.

`router_client.pricing.copies` decides whether a source pays off; this module carries it out.
"""

from collections.abc import Mapping
from typing import Any

from kvatlas.dataclass import replace
from kvatlas.fleet.records import KvConnector
from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.tokens.text_request import TextRequest
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.fetch_fields import Fetch

CARRIED_OUT = frozenset({KvConnector.P2P, KvConnector.KVCR})
"""Connectors for which these routers can name sources to engines."""


def let_fetch(read: RequestPrompt, text: TextRequest | None) -> RequestPrompt:
    """The prompt, allowed to be priced with a fetch of KV if its request can name a source and asks for one answer to one
    prompt. With several prompts or answers, an engine would use the same source and id for each of them."""
    if text is None or not text.api.is_checked or text.prompts != 1 or text.choices != 1:
        return read
    return RequestPrompt(replace(read.prompt, fetch_by=CARRIED_OUT), read.prompt_tokens, read.untokenized)


def fetch_fields(choice: Booked, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields to add to the body for the worker that computes the prompt, if that worker should fetch KV; they are new
    for each attempt."""
    fetch = fetch_of(choice)
    return {} if fetch is None else fetch.fields(body)


def fetch_of(choice: Booked) -> Fetch | None:
    """The fetch by the worker that computes the prompt."""
    return ((choice.prefill or choice.decode) if isinstance(choice, PairChoice) else choice).fetch
