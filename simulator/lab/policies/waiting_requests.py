"""The waiting requests of a fleet's routers, and when each router asks for its turns: as `kvatlas_router.admission.queue` does,
in virtual time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from kvatlas.reservations import QueueLimits, Turns, WaitingRequest
from kvatlas.reservations.protocol import ID_BYTES
from kvatlas_router.admission.queue import LEAST_LOOK_S, LOOK_S, NEAR_LOOK_S, QueueSettings
from kvatlas_simulator.lab.requests import LabRequest

AskTurns = Callable[[int], Turns]
"""Asks for the turns of the router with this number."""


@dataclass(slots=True)
class _Router:
    """`waiting`: requests by number. Virtual microseconds: it asks next at `look_us`, and last asked at `looked_us`."""

    waiting: dict[int, LabRequest] = field(default_factory=dict)
    look_us: float = math.inf
    looked_us: float = -math.inf


class WaitingRequests:
    """What waits at each of the routers. Every request may go to every engine."""

    def __init__(self, routers: int, settings: QueueSettings) -> None:
        self._settings = settings
        self._routers = [_Router() for _ in range(routers)]
        self._of: dict[int, tuple[int, float]] = {}

    def router_of(self, request: LabRequest) -> int | None:
        """The router at which a request waits; None: it does not wait."""
        known = self._of.get(request.number)
        return None if known is None else known[0]

    def row(self, request: LabRequest, now_us: float) -> WaitingRequest | None:
        """The request as it waits, or may wait; None: its time is over."""
        if self._is_over(request, now_us):
            return None
        _, arrived_us = self._of.get(request.number, (0, now_us))
        return WaitingRequest(
            request.number.to_bytes(ID_BYTES, "big"),
            request.identity.tenant,
            QueueLimits(self._settings.requests, self._settings.tokens),
            request.input_tokens,
            weight=request.weight,
            program=str(request.session),
            age_us=round(now_us - arrived_us),
            left_us=round(arrived_us + self._settings.wait_s * 1e6 - now_us),
        )

    def _is_over(self, request: LabRequest, now_us: float) -> bool:
        """True if a request has waited for as long as it may."""
        known = self._of.get(request.number)
        return known is not None and now_us >= known[1] + self._settings.wait_s * 1e6

    def add(self, request: LabRequest, router: int, now_us: float) -> None:
        """Let a request wait, unless it does."""
        if request.number in self._of:
            return
        self._of[request.number] = router, now_us
        mine = self._routers[router]
        mine.look_us = min(mine.look_us, max(now_us, mine.looked_us + LEAST_LOOK_S * 1e6))
        mine.waiting[request.number] = request

    def remove(self, request: LabRequest, now_us: float) -> None:
        """Record that a request was sent or refused, if it waited."""
        if (known := self._of.pop(request.number, None)) is not None:
            del self._routers[known[0]].waiting[request.number]
            self.record_end(known[0], now_us)

    def record_end(self, router: int, now_us: float) -> None:
        """Record that a request of this router ended: there may be room."""
        mine = self._routers[router]
        if mine.waiting:
            mine.look_us = min(mine.look_us, max(now_us, mine.looked_us + LEAST_LOOK_S * 1e6))

    @property
    def next_look_us(self) -> float:
        """When the next router asks; infinite: nothing waits."""
        return min(mine.look_us for mine in self._routers)

    def take_due(self, now_us: float, ask: AskTurns) -> list[LabRequest]:
        """The requests to try now, because it is their turn or their time is over."""
        due: list[LabRequest] = []
        for number, mine in enumerate(self._routers):
            if mine.look_us > now_us:
                continue
            turns = ask(number)
            mine.looked_us = now_us
            mine.look_us = now_us + (NEAR_LOOK_S if turns.near else LOOK_S) * 1e6 if mine.waiting else math.inf
            due += (mine.waiting[int.from_bytes(id, "big")] for id in turns.turns)
            due += takewhile(partial(self._is_over, now_us=now_us), mine.waiting.values())  # the oldest are first
        return due
