"""Surcharges: what is added to costs so that sessions keep their worker, and so that the cheapest is not always chosen.

Both are worked out without memory from what every router knows, so all routers add the same, also right after their start.
They are never negative, and nothing for the worker that they favour: its cost stays what is expected of it.

- **session**: a session's worker is the one of the candidates that weighs most by a hash of the session's id and the worker
  (rendezvous hashing): where a worker leaves, only its own sessions move. All others cost `session_us` more.
- **softening**: with temperature T each worker is chosen with a probability proportional to exp(-cost / (T x scale)), the
  scale being the cheapest cost without load. Drawn by the Gumbel trick (the least of cost - T x scale x G, G with Gumbel's
  distribution) from a hash of seed, prompt and worker: so the draw is a summand that each worker brings to the booking,
  which stays one call, and the same prompt draws the same everywhere.
"""

from collections.abc import Sequence
from math import log

from kvatlas.cost.protocol import TermKind
from router_client.pricing.quotes import Prospect, Surcharge, rendezvous

SESSION = TermKind("session", "sessions elsewhere")
SOFTENING = TermKind("softening", "hundredths drawn")

_HASHES = float(1 << 64)


def session_worker(session_id: str, workers: Sequence[str]) -> str:
    """Where a session belongs, of these workers; the first of equals."""
    return max(workers, key=lambda id: rendezvous(b"session\x00" + session_id.encode(), id))


def gumbel(fingerprint: bytes, worker_id: str) -> float:
    """A worker's draw for a prompt, with Gumbel's distribution."""
    return -log(-log((rendezvous(b"softening\x00" + fingerprint, worker_id) + 0.5) / _HASHES))


def surcharged(
    found: list[Prospect], fingerprint: bytes, *, session_id: str | None, session_us: float, temperature: float
) -> list[Prospect]:
    """The same prospects with their surcharges. `fingerprint`: of the prompt, and the router's seed."""
    added: dict[str, list[Surcharge]] = {prospect.id: [] for prospect in found}
    if session_us and session_id is not None and found:
        home = session_worker(session_id, sorted(added))
        for id, mine in added.items():
            if id != home:
                mine.append(Surcharge(SESSION, round(session_us), 1))
    if temperature and found:
        unit_us = temperature * min(prospect.base_us for prospect in found)
        drawn = {id: gumbel(fingerprint, id) for id in added}
        most = max(drawn.values())
        for id, mine in added.items():
            below = most - drawn[id]
            if below:
                mine.append(Surcharge(SOFTENING, round(unit_us * below), round(100 * below)))
    return [
        prospect._replace(surcharges=tuple(mine), surcharge_us=sum(one.us for one in mine)) if mine else prospect
        for prospect in found
        for mine in (added[prospect.id],)
    ]
