"""The store's answer to an ask, and the evaluations in it, which are computed when they are read."""

from collections.abc import Mapping, Sequence
from math import isfinite
from struct import Struct
from typing import overload

import msgpack

from kvatlas.cost.protocol import Load
from kvatlas.reservations.evaluation import UsablePrediction, WorkerLoad, evaluate_offer, offer_holding
from kvatlas.reservations.lookup import NotInHbm, TooManyAlike
from kvatlas.reservations.protocol import (
    STALE_US,
    Ask,
    Evaluation,
    LookAlikes,
    LookAlikesUnknown,
    Offer,
    OfferEvaluation,
)
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit
from kvatlas.reservations.waiting_request import MustWait, Place, QueueIsFull, WaitReason

_WORKER = Struct(">12d")
"""The start of a worker's record; see `functions/_layout.lua`."""
_NOT_IN_HBM, _TOO_MANY, _MUST_WAIT, _QUEUE_IS_FULL = -2, -3, -4, -5
_WAIT_REASONS = {1: WaitReason.FULL, 2: WaitReason.TURN}


class _OfferEvaluations(Sequence[OfferEvaluation]):
    """The evaluation of each offer, computed again on access exactly as in the store, because a router reads just one of many.

    `records`: the stored record of each offer's worker (`functions/_layout.lua`).
    """

    def __init__(
        self,
        ask: Ask,
        offers: Sequence[Offer],
        records: Sequence[bytes],
        groups: Sequence[LookAlikes],
        now_us: int,
        mean: Load,
        in_flight: int,
        best: Mapping[str, UsablePrediction],
    ) -> None:
        """`groups`: the look-alikes whose offers follow the ask's own offers."""
        self._ask = ask
        self._offers = offers
        self._records = records
        self._groups = groups
        self._now_us = now_us
        self._mean = mean
        self._in_flight = in_flight
        self._best = best

    @overload
    def __getitem__(self, index: int) -> OfferEvaluation: ...
    @overload
    def __getitem__(self, index: slice) -> list[OfferEvaluation]: ...
    def __getitem__(self, index: int | slice) -> OfferEvaluation | list[OfferEvaluation]:
        numbers = range(len(self))[index]
        return self._evaluate(numbers) if isinstance(numbers, int) else [self._evaluate(number) for number in numbers]

    def __len__(self) -> int:
        return len(self._records)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _evaluate(self, number: int) -> OfferEvaluation:
        ask, offer = self._ask, self._offers[number]
        fields = _WORKER.unpack_from(self._records[number])
        # the store refuses damaged records, but does not look at all of them for each choice
        if not isfinite(sum(fields)):
            fields = tuple(field if isfinite(field) else 0 for field in fields)
        sampled_us, _, queued, running, waiting, kv, more_queued, more_running, more_kv, _, slots, kv_limit = map(
            int, fields
        )
        limit, first_member = UNKNOWN_LIMIT, len(ask.offers)
        if ask.limits is not None:
            if number < first_member:
                limit = ask.limits.of_offers[number]
            else:
                room = (0, 0) if ask.limits.look_alikes_have_room else (slots, kv_limit)
                limit = Limit(*room, self._groups[number - first_member].decode_us)
        reported = Load(running, queued, waiting, kv) if self._now_us - sampled_us < STALE_US else None
        load = WorkerLoad(reported, Load(more_running, more_queued, 0, more_kv))
        prediction = self._best.get(offer.worker_id)
        return evaluate_offer(ask, offer, limit, load, self._mean, prediction, self._in_flight, self._now_us)[1]


class _MemberOffers(Sequence[Offer]):
    """The offers to the look-alikes that were looked up, each made when it is read, because a router reads just one of them.

    `rows`: the numbers of their rows of look-alikes, from 1.
    """

    def __init__(self, ask: Ask, rows: Sequence[int], worker_ids: Sequence[str], held_tokens: Sequence[int]) -> None:
        self._ask = ask
        self._rows = rows
        self._worker_ids = worker_ids
        self._held_tokens = held_tokens

    @overload
    def __getitem__(self, index: int) -> Offer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Offer]: ...
    def __getitem__(self, index: int | slice) -> Offer | list[Offer]:
        numbers = range(len(self))[index]
        return self._offer(numbers) if isinstance(numbers, int) else [self._offer(number) for number in numbers]

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _offer(self, number: int) -> Offer:
        return offer_holding(self._ask, self._rows[number] - 1, self._worker_ids[number], self._held_tokens[number])


def unpack_evaluation(ask: Ask, answer: bytes) -> Evaluation | None:
    """Unpack the answer of `functions/_choice.lua` or `functions/book.lua`. Returns None for a booking that was cancelled.
    Raises LookAlikesUnknown, MustWait or QueueIsFull."""
    chosen, *rest = msgpack.unpackb(answer, raw=True)
    if not chosen:
        return None
    if chosen == _MUST_WAIT:
        raise MustWait(Place(_WAIT_REASONS[rest[0]], *rest[1:]))
    if chosen == _QUEUE_IS_FULL:
        raise QueueIsFull(*rest)
    if chosen == _NOT_IN_HBM:
        raise NotInHbm("the cheapest worker holds blocks in other tiers")
    if chosen == _TOO_MANY:
        raise TooManyAlike("the cheapest worker was not among those that one call may read")
    if chosen < 0:
        raise LookAlikesUnknown(f"the store has fewer than {ask.least_members} look-alikes for an ask")
    prefill, now_us, mean, in_flight, predictions, records, members, source = rest
    queued, running, waiting, kv_tokens = mean or (0, 0, 0, 0)
    each = zip(predictions[::3], predictions[1::3], predictions[2::3], strict=True)
    best = {worker_id.decode(): UsablePrediction(tokens, ready_us) for worker_id, tokens, ready_us in each}
    mean_load = Load(running, queued, waiting, kv_tokens)
    names, rows, member_records, depths = (members[at::4] for at in range(4))
    offers, groups, held_tokens = ask.offers, [ask.look_alikes[row - 1] for row in rows], []
    worker_ids = [name.decode() for name in names]
    if ask.lookup is not None:
        chains = ask.lookup.chains
        for depth, row in zip(depths, rows, strict=True):
            one = chains[row - 1]
            held_tokens.append(int(depth) * one.tokens if one else 0)
        offers, records = _MemberOffers(ask, rows, worker_ids, held_tokens), member_records
    elif members:
        more = [each.offer._replace(worker_id=id) for id, each in zip(worker_ids, groups, strict=True)]
        offers, records = [*offers, *more], [*records, *member_records]
    by_offer = _OfferEvaluations(ask, offers, records, groups, now_us, mean_load, in_flight, best)
    source_id = source.decode() or None
    looked_up = worker_ids if ask.lookup is not None else ()
    return Evaluation(chosen - 1, offers, by_offer, prefill - 1 if prefill else None, held_tokens, looked_up, source_id)
