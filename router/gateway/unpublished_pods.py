"""Chooses among pods without a publisher, by the first bytes of the request's body and by the number of requests that
this process has running on each pod."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import xxhash

from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.engine_objects.object_use import ObjectUse
from kvatlas_router.gateway.asked_request import AskedRequest
from kvatlas_router.gateway.picker import Destination
from kvatlas_router.proxy.headers import DECISION_HEADER, RawHeaders
from kvatlas_router.tokens.text_request import TextRequest
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage

PREFIX_BYTES = 4_096
"""Requests that share this many first bytes go to the same pod, to reuse its cache."""
MOST_ABOVE_MEAN = 1.25
"""No pod gets more than this multiple of the mean number of running requests (consistent hashing with bounded
loads)."""


class UnpublishedPods:
    """Chooses pods knowing only this process's own running requests on each."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    def choose(self, asked: AskedRequest, endpoints: Sequence[str], fallbacks: int) -> "UnpublishedRequest":
        """Choose one of `endpoints` (at least one), and up to `fallbacks` others."""
        prefix = xxhash.xxh3_64_intdigest(asked.call.body[:PREFIX_BYTES])
        order = sorted(
            endpoints, key=lambda endpoint: xxhash.xxh3_64_intdigest(endpoint.encode(), prefix), reverse=True
        )
        running = self._running
        most = math.ceil(MOST_ABOVE_MEAN * (1 + sum(running[each] for each in endpoints)) / len(endpoints))
        first = next(endpoint for endpoint in order if running[endpoint] < most)
        rest = [endpoint for endpoint in order if endpoint != first]
        return UnpublishedRequest(self._running, Destination((first, *rest[:fallbacks]), {}, asked.changed), asked)


class UnpublishedRequest:
    """A request to a pod without a publisher. Nothing is predicted or booked, so there is nothing to compare or
    learn."""

    text: TextRequest | None = None
    hides_usage = False
    objects: ObjectUse | None = None
    answer_headers: Mapping[str, str] = {DECISION_HEADER.lower(): "by=prefix_hash;open=publisher"}

    def __init__(self, running: "Counter[str]", destination: Destination, asked: AskedRequest) -> None:
        self.labels = asked.labels
        self.renaming = asked.renaming
        self.destination = destination
        self._running = running
        self._endpoint = destination.endpoints[0]
        running[self._endpoint] += 1

    async def begin(self, status: int, headers: RawHeaders, served: str | None) -> None:
        """See `PickedRequest`."""

    def pass_part(self, part: bytes) -> None:
        """See `PickedRequest`."""

    async def first_token(self) -> None:
        """See `PickedRequest`."""

    async def finish(self, usage: Usage | None, timings: Timings | None) -> None:
        """See `PickedRequest`."""
        self._end()

    async def keep(self, ids: Sequence[str]) -> None:
        """See `PickedRequest`."""

    async def fail(self, error: EngineError | None = None) -> None:
        """See `PickedRequest`."""
        self._end()

    async def leave(self) -> None:
        """See `PickedRequest`. The request counts as over, since its real end will never be seen."""
        self._end()

    def _end(self) -> None:
        self._running[self._endpoint] -= 1
        if not self._running[self._endpoint]:
            del self._running[self._endpoint]
