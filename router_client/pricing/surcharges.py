"""Surcharges on costs, so that sessions keep their worker, and so that the cheapest worker is not always chosen.

Both are stateless and are computed from what every router knows, so all routers add the same surcharges, even right after a
start. They are never negative, and are zero for the favored worker, whose cost stays as expected.

- **session**: a session belongs to the candidate with the highest hash weight of the session's id and the worker (rendezvous
  hashing), so that if a worker disappears, only its own sessions move. All other workers cost `session_us` more.
- **softening**: at temperature T, a worker is chosen with a probability proportional to exp(-cost / (T × scale)), where scale
  is the cheapest cost without load. It is sampled with the Gumbel-max trick (the minimum of cost - T × scale × G, where G has
  a Gumbel distribution), from a hash of seed, prompt and worker. The draw is added to each worker's cost, so booking still
  takes one call, and the same prompt draws the same on every router.
"""

from collections.abc import Iterable, Sequence
from math import log

from kvatlas.cost.protocol import TermKind
from router_client.pricing.quotes import Quote, Surcharge, rendezvous_weight

SESSION = TermKind("session", "sessions elsewhere")
SOFTENING = TermKind("softening", "hundredths drawn")

_HASHES = float(1 << 64)


def session_worker(session_id: str, workers: Sequence[str]) -> str:
    """The worker that a session belongs to; ties go to the first one."""
    return max(workers, key=lambda id: rendezvous_weight(b"session\x00" + session_id.encode(), id))


def gumbel(fingerprint: bytes, worker_id: str) -> float:
    """A worker's draw for a prompt, Gumbel-distributed."""
    return -log(-log((rendezvous_weight(b"softening\x00" + fingerprint, worker_id) + 0.5) / _HASHES))


def add_session_surcharge(
    quotes: Iterable[Quote], home: str, session_us: float, *, members: bool = False
) -> list[Quote]:
    """The quotes plus the surcharge for all workers except `home`. `members`: the quotes are for look-alikes, which
    never include `home`."""
    return [quote if quote.id == home and not members else away_from_session(quote, session_us) for quote in quotes]


def away_from_session(quote: Quote, session_us: float) -> Quote:
    """The quote plus the surcharge for a worker other than the session's."""
    return _plus(quote, [Surcharge(SESSION, round(session_us), 1)])


def add_surcharges(
    quotes: list[Quote], fingerprint: bytes, *, session_id: str | None, session_us: float, temperature: float
) -> list[Quote]:
    """The quotes with their surcharges. `fingerprint`: that of the prompt, including the router's seed."""
    added: dict[str, list[Surcharge]] = {quote.id: [] for quote in quotes}
    if session_us and session_id is not None and quotes:
        home = session_worker(session_id, sorted(added))
        for id, mine in added.items():
            if id != home:
                mine.append(Surcharge(SESSION, round(session_us), 1))
    if temperature and quotes:
        unit_us = temperature * min(quote.base_us for quote in quotes)
        draws = {id: gumbel(fingerprint, id) for id in added}
        highest = max(draws.values())
        for id, mine in added.items():
            below = highest - draws[id]
            if below:
                mine.append(Surcharge(SOFTENING, round(unit_us * below), round(100 * below)))
    return [_plus(quote, mine) if mine else quote for quote in quotes for mine in (added[quote.id],)]


def _plus(quote: Quote, added: Sequence[Surcharge]) -> Quote:
    us = sum(one.us for one in added)
    return quote._replace(surcharges=(*quote.surcharges, *added), surcharge_us=quote.surcharge_us + us)
