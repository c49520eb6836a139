"""The router client: overlap, cost and choice for routers. It needs only the plain install, without extras.

from router_client import Prompt, RouterClient, Scope

async with RouterClient.open("redis://127.0.0.1:6379") as router:
    async with router.route(Prompt.of_tokens(Scope("llama", "llama"), token_ids)) as choice:
        print(choice.url, choice.explain())

`SyncRouterClient` is the same without `async` and `await`.

The path of one choice through the files:

    client.py, sync.py          the calls; results.py, overlap_result.py and prefill_decode_result.py are what they return
    decision/decider.py         the steps below under one deadline; kvatlas/store/deadline.py if the store is slow or down
      fleet_cache.py            read the pool's workers (pricing/pool.py)
      decision/index_lookup.py  look up the prompt's overlap (prompt_chain.py, chain_cache.py, pricing/overlap.py)
      decision/policy.py        price the candidates without load (pricing/quotes.py, prefill_decode.py, surcharges.py)
      booking/ask.py            build the ask: the cheapest worker under load, within its limits (pricing/slo.py)
      booking/booker.py         evaluate or book, in the store or alone (booking/reservation.py, leases.py)
      decision/choice_builder.py  turns the booked offer into the choice
    pricing/ranking.py          every candidate with its terms, computed when it is read
    choice_statistics.py        statistics of the choice and its answer
    learning/                   afterwards: rates learned from finished requests, and prediction accuracy

The servers that build on it, the proxy and the endpoint picker, are in `router/`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router_client.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names together on first use: redis-py and pydantic take a few tenths of a second."""
    if name.startswith("__") and name != "__all__":  # names that the import system looks up on a package
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = import_module("router_client.api")
    globals().update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
