"""Requests permission from a partition's owner to send a large snapshot (thin).

Owners limit the bytes of outstanding snapshots, because after a leader change in NATS every outbox overflows at once.
"""

import random
from collections.abc import Callable

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from kvatlas.bus.control import GrantReply, GrantRequest
from kvatlas.bus.subjects import grant_subject
from kvatlas.errors import InvalidValue
from kvatlas.runtime.backoff import Backoff
from kvatlas_publishers.counters import PublisherCounters

ANSWER_S = 1.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 3.0


async def await_grant(
    client: Client,
    partitions: int,
    next_request: Callable[[], GrantRequest | None],
    counters: PublisherCounters,
    rng: random.Random,
    on_refused: Callable[[], None],
) -> None:
    """Ask until the grant is given, with jitter: again when the owner says to, or with back-off if no owner answers.
    `next_request` is called each time, since the held blocks change in the meantime; it returns None if a grant is no
    longer needed. `on_refused`: called for every missing or negative answer."""
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while (request := next_request()) is not None:
        counters.grants_asked += 1
        try:
            answer = await client.request(
                grant_subject(request.worker_id, partitions), request.pack(), timeout=ANSWER_S
            )
            reply = GrantReply.unpack(answer.data)
        except (NatsError, TimeoutError, InvalidValue) as error:
            counters.grants_unanswered += 1
            pause_s = backoff.next_s()
            wait_s = pause_s if isinstance(error, NoRespondersError) else 0.0  # other errors have already taken time
        else:
            if reply.granted:
                return
            counters.grants_denied += 1
            wait_s = max(reply.retry_after_ms / 1000, FIRST_PAUSE_S)
        on_refused()
        await anyio.sleep(wait_s * rng.uniform(0.75, 1.25) + rng.uniform(0, FIRST_PAUSE_S))
