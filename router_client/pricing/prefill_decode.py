"""Pairs: one worker computes a request's prompt, another one its answer; or one both, whichever costs less.

A pair costs the prompt on a worker that computes prompts alone (its queue, its cache), the transfer of the KV that the other
one does not hold, and the answer there. KV can go where both name a common transfer group and cut blocks alike; workers that
name no group at all are taken to reach each other, because a prefill worker is of no other use. Below a number of new tokens
a worker computes the prompt itself, if it can.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.protocol import Piece
from kvatlas.fleet.records import EngineEndpoint
from kvatlas.request import SelectionResult
from kvatlas.reservations import Ask, Evaluation, Offer, OfferEvaluation, PairLayout
from kvatlas.reservations.limits import Limit
from router_client.pricing.overlap import HeldPrefix
from router_client.pricing.pool import Candidate, Pool, serves_whole
from router_client.pricing.quotes import Prospect, prospects
from router_client.pricing.ranking import Judging, Ranked
from router_client.prompt import Prompt

_Reach = tuple[frozenset[str], int, str]
"""Prefill workers that the same workers can read from at the same price: transfer groups, block size, locality domain."""


@dataclass(frozen=True, slots=True)
class PairProspects:
    """Of one request: `prefills` compute the prompt alone, `decodes` the answer alone, `wholes` both, without load.

    `groups`: of each prefill prospect, the number of those that can be read from alike. `prices_us`: of each decode prospect
    what its answer costs with the KV from each of these groups; None: it can't be read.
    """

    prefills: Sequence[Prospect]
    decodes: Sequence[Prospect]
    wholes: Sequence[Prospect]
    groups: Sequence[int]
    prices_us: Sequence[Sequence[float | None]]

    @property
    def everyone(self) -> list[Prospect]:
        """In the order of an ask's offers."""
        return [*self.prefills, *self.decodes, *self.wholes]

    @property
    def possible(self) -> bool:
        """Can anybody answer?"""
        return bool(self.wholes or self.decodes)

    def surcharged(self, surcharge: Callable[[list[Prospect]], list[Prospect]]) -> "PairProspects":
        """With what a policy adds to the workers that answer, the same whether they compute the prompt or not."""
        answering = list({one.id: one for one in (*self.decodes, *self.wholes)}.values())
        result = surcharge(answering)
        if result is answering:  # nothing was added
            return self
        added = {one.id: one for one in result}

        def with_added(some: Sequence[Prospect]) -> list[Prospect]:
            return [
                one._replace(surcharges=added[one.id].surcharges, surcharge_us=added[one.id].surcharge_us)
                for one in some
            ]

        return replace(self, decodes=with_added(self.decodes), wholes=with_added(self.wholes))

    def ask(self, ask: Ask) -> Ask:
        """An ask about `everyone`, made to choose among pairs.

        For the answer alone a worker's queue of prompts does not count: the KV comes while that is worked off.
        """
        first, end = len(self.prefills), len(self.prefills) + len(self.decodes)
        answers = [_answer_alone(*one) for one in zip(ask.offers[first:end], self.decodes, strict=True)]
        offers = [*ask.offers[:first], *answers, *ask.offers[end:]]
        limits = ask.limits
        if limits is not None:
            each = list(limits.of_offers)
            for i, prospect in enumerate(self.decodes, start=first):
                each[i] = _with_room_for(each[i], prospect.transferred)
            limits = replace(limits, of_offers=each)
        transfers = [[-1.0 if us is None else us for us in prices] for prices in self.prices_us]
        pairing = PairLayout(len(self.prefills), len(self.decodes), self.groups, transfers)
        return replace(ask, offers=offers, limits=limits, pair_layout=pairing)


def pair_prospects(
    prompt: Prompt,
    pool: Pool,
    held: Mapping[str, HeldPrefix],
    *,
    fingerprint: bytes,
    least_new_tokens: int,
) -> PairProspects:
    """`least_new_tokens`: a worker that would compute fewer itself gets no prompt computed elsewhere."""
    alone = replace(prompt, output_tokens=0)
    prefills = prospects(alone, pool, held, fingerprint=fingerprint, candidates=pool.prefillers)
    decoders = prospects(prompt, pool, held, fingerprint=fingerprint, candidates=pool.decoders)
    reaches: dict[_Reach, int] = {}
    groups = [reaches.setdefault(_reach(p.candidate), len(reaches)) for p in prefills]
    decodes: list[Prospect] = []
    prices_us: list[list[float | None]] = []
    for whole in decoders if prefills else ():
        short = prompt.input_tokens - whole.cached_tokens < least_new_tokens
        if short and serves_whole(whole.candidate.endpoint):
            continue
        nearness = [_nearness(whole.candidate, reach) for reach in reaches]
        answers = {near: _answer(whole, near) for near in (True, False) if near in nearness}
        if answers:
            decodes.append(next(iter(answers.values())))
            prices_us.append([None if near is None else answers[near].base_us for near in nearness])
    wholes = [prospect for prospect in decoders if serves_whole(prospect.candidate.endpoint)]
    return PairProspects(prefills, decodes, wholes, groups, prices_us)


class PairRanking:
    """What was chosen of a request's pairs, and what else could have been: priced when somebody looks."""

    def __init__(self, found: PairProspects, weighing: Evaluation, judging: Judging) -> None:
        self._found = found
        self._weighing = weighing
        self._judging = judging
        self._first_decode = len(found.prefills)
        self._first_whole = len(found.prefills) + len(found.decodes)

    @property
    def prefill(self) -> SelectionResult | None:
        """Of the worker that computes the prompt alone; None where the other one computes both."""
        return None if self._weighing.prefill is None else self.prefills[0]

    @property
    def decode(self) -> SelectionResult:
        """Of the worker that computes the answer, with the transfer, and where there is no other one, the prompt."""
        return (self.wholes if self._weighing.prefill is None else self.decodes)[0]

    @property
    def otherwise(self) -> "Otherwise | None":
        """The cheapest of the other kind: one worker for both, or a pair (with the cheapest prefill, or nearly so)."""
        if self._weighing.prefill is not None:
            return Otherwise(None, self.wholes[0]) if self.wholes else None
        return Otherwise(self.prefills[0], self.decodes[0]) if self.decodes else None

    @cached_property
    def prefills(self) -> Ranked:
        """Every worker that may compute the prompt alone."""
        return self._ranked(self._found.prefills, 0, self._weighing.prefill)

    @cached_property
    def wholes(self) -> Ranked:
        """Every worker that may compute both."""
        chosen = self._weighing.chosen - self._first_whole if self._weighing.prefill is None else None
        return self._ranked(self._found.wholes, self._first_whole, chosen)

    @cached_property
    def decodes(self) -> Ranked:
        """Every worker that may compute the answer alone, with the KV from the chosen prefill worker or, where none is
        chosen, from the cheapest."""
        if not self._found.prefills:
            return self._of([], [], None)
        found, weighing = self._found, self._weighing
        number = weighing.prefill
        if number is None:
            best = self.prefills[0].worker_id
            number = next(i for i, prospect in enumerate(found.prefills) if prospect.id == best)
        source = found.prefills[number].candidate
        made: list[Prospect] = []
        weighed: list[OfferEvaluation] = []
        chosen: int | None = None
        for i, prospect in enumerate(found.decodes):
            near = _nearness(prospect.candidate, _reach(source))
            if near is None:
                continue
            answer = _answer(prospect, near)
            seen = weighing.by_offer[self._first_decode + i]
            load = seen.load._replace(queued_prefill_tokens=0, waiting_requests=0)
            if weighing.prefill is not None and weighing.chosen == self._first_decode + i:
                chosen = len(made)
            made.append(answer._replace(source=source.id))
            weighed.append(seen._replace(load=load))
        return self._of(made, weighed, chosen)

    def _ranked(self, some: Sequence[Prospect], first: int, chosen: int | None) -> Ranked:
        return self._of(some, self._weighing.by_offer[first : first + len(some)], chosen)

    def _of(self, some: Sequence[Prospect], weighed: Sequence[OfferEvaluation], chosen: int | None) -> Ranked:
        return Ranked(some, weighed, chosen=chosen, judging=self._judging)


class Otherwise(NamedTuple):
    """What was not chosen."""

    prefill: SelectionResult | None
    decode: SelectionResult

    @property
    def score_us(self) -> int:
        return self.decode.score_us + (self.prefill.score_us if self.prefill is not None else 0)

    def explain(self) -> str:
        if self.prefill is None:
            return self.decode.explain()
        return f"{self.prefill.explain()} and {self.decode.explain()}"

    def explanation(self) -> dict[str, Any]:
        prefill = None if self.prefill is None else self.prefill.explanation()
        return {"score_us": self.score_us, "prefill": prefill, "decode": self.decode.explanation()}


def _reach(candidate: Candidate) -> _Reach:
    endpoint = candidate.endpoint
    return _groups(endpoint), candidate.block_size, endpoint.locality_domain


def _groups(worker: EngineEndpoint) -> frozenset[str]:
    return frozenset(worker.transfer_groups or ("",))


def _nearness(candidate: Candidate, source: _Reach) -> bool | None:
    """Is a prefill worker in the same locality domain? None: its KV can't be read."""
    groups, size, domain = source
    if size != candidate.block_size or not groups & _groups(candidate.endpoint):
        return None
    return domain == candidate.endpoint.locality_domain


def _answer(prospect: Prospect, near: bool) -> Prospect:
    """A worker that computes the answer alone, and reads what it does not hold from a prefill worker."""
    quote, own = prospect.quote, prospect.quote.pieces(prospect.own.runs, 0, prospect.usable)
    rest = quote.prompt.input_tokens - prospect.usable
    moved = [Piece(rest, quote.kv_bytes(rest), Tier.HBM, own=False, same_domain=near)] if rest else []
    base_us, work_us = quote.priced([*own, *moved])
    return prospect._replace(base_us=base_us, work_us=work_us, moved=moved, source=None)


def _answer_alone(offer: Offer, prospect: Prospect) -> Offer:
    """Nothing is computed of the prompt, and what the answer costs without load is the pair's price."""
    kind = offer.kind._replace(chain=None, prices=offer.kind.prices._replace(queued_us=0.0))
    return offer._replace(kind=kind, base_us=float(prospect.surcharge_us), work_us=0.0)


def _with_room_for(limit: Limit, moved: int) -> Limit:
    """The room that is left once the KV has come."""
    return limit._replace(kv_tokens=max(1, limit.kv_tokens - moved)) if limit.kv_tokens else limit
