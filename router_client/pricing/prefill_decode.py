"""Separate prefill and decode: one worker computes a request's prompt and another its answer, unless one worker for both is
cheaper.

A pair costs the prompt on a prefill worker (its queue, its cache), the transfer of the KV that the decode worker does not
hold, and decoding there. KV can be moved between two workers that name a common transfer group, have the same block size and
speak the same protocol (vLLM's or SGLang's). Workers that name no group are assumed to reach each other, because otherwise a
prefill worker would be useless. If there are fewer than a certain number of new tokens, a worker computes the prompt itself
if it can.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.protocol import Piece
from kvatlas.dataclass import dataclass
from kvatlas.fleet.records import EngineEndpoint
from kvatlas.request import SelectionResult
from kvatlas.reservations import Ask, Evaluation, Offer, OfferEvaluation, PairLayout
from kvatlas.reservations.protocol import MOST_OFFERS
from router_client.pricing.candidates import Candidate
from router_client.pricing.overlap import HeldPrefix
from router_client.pricing.pool import Pool, serves_whole
from router_client.pricing.quote_desk import quote_candidates
from router_client.pricing.quotes import Quote, cheapest, shortlist, with_source
from router_client.pricing.ranking import Criteria, RankedResults
from router_client.pricing.transfer_protocol import TransferProtocol
from router_client.prompt import Prompt


class _KvSource(NamedTuple):
    """The properties of a prefill worker that decide which workers can read its KV, and at what price."""

    transfer_groups: frozenset[str]
    block_size: int
    block_bytes: int
    locality_domain: str
    protocol: TransferProtocol | None

    @classmethod
    def of(cls, candidate: Candidate) -> "_KvSource":
        endpoint = candidate.endpoint
        protocol = TransferProtocol.of(endpoint.kind)
        block_bytes = endpoint.bytes_in(Tier.HBM.label)
        return cls(_transfer_groups(endpoint), candidate.block_size, block_bytes, endpoint.locality_domain, protocol)


@dataclass(frozen=True, slots=True)
class PairQuotes:
    """Quotes for one request: `prefills` for the prompt alone, `decodes` for the answer alone, `wholes` for both.

    `groups`: the group number of each prefill quote; the KV of all workers in a group has the same price. `prices_us`:
    for each decode quote, the price of the answer with the KV from each group; None: that KV can't be read.
    """

    prefills: Sequence[Quote]
    decodes: Sequence[Quote]
    wholes: Sequence[Quote]
    groups: Sequence[int]
    prices_us: Sequence[Sequence[float | None]]

    @property
    def all_quotes(self) -> list[Quote]:
        """All quotes, in the order of an ask's offers."""
        return [*self.prefills, *self.decodes, *self.wholes]

    @property
    def can_serve(self) -> bool:
        """True if any worker or pair can serve the request."""
        return bool(self.wholes or self.decodes)

    def add_surcharges(self, add: Callable[[list[Quote]], list[Quote]]) -> "PairQuotes":
        """Add the policy's surcharges to the workers that answer, whether or not they also compute the prompt."""
        plain = {q.id: q._replace(surcharges=(), surcharge_us=0) for q in (*self.decodes, *self.wholes)}
        answering = list(plain.values())
        result = add(answering)
        if result is answering:  # no surcharge was added
            return self
        added = {quote.id: quote for quote in result}

        def copy_surcharges(some: Sequence[Quote]) -> list[Quote]:
            return [
                quote._replace(
                    surcharges=(*quote.surcharges, *added[quote.id].surcharges),
                    surcharge_us=quote.surcharge_us + added[quote.id].surcharge_us,
                )
                for quote in some
            ]

        return replace(self, decodes=copy_surcharges(self.decodes), wholes=copy_surcharges(self.wholes))

    def shortlist(self) -> "PairQuotes":
        """The cheapest quotes of each kind, so that one ask may name them all."""
        if len(self.prefills) + len(self.decodes) + len(self.wholes) <= MOST_OFFERS:
            return self
        prefills, decodes = (cheapest(some, MOST_OFFERS // 3) for some in (self.prefills, self.decodes))
        return PairQuotes(
            [self.prefills[i] for i in prefills],
            [self.decodes[i] for i in decodes],
            shortlist(self.wholes, most=MOST_OFFERS // 3),
            [self.groups[i] for i in prefills],
            [self.prices_us[i] for i in decodes],
        )

    def to_pair_ask(self, ask: Ask) -> Ask:
        """Turn an ask about `all_quotes` into one that also chooses among pairs.

        The queue of prompts at a decode worker does not count, because the KV arrives while that queue is processed.
        """
        first, end = len(self.prefills), len(self.prefills) + len(self.decodes)
        decodes = [_decode_offer(*one) for one in zip(ask.offers[first:end], self.decodes, strict=True)]
        offers = [*ask.offers[:first], *decodes, *ask.offers[end:]]
        transfers = [[-1.0 if us is None else us for us in prices] for prices in self.prices_us]
        pairing = PairLayout(len(self.prefills), len(self.decodes), self.groups, transfers)
        return replace(ask, offers=offers, pair_layout=pairing)


def quote_pairs(
    prompt: Prompt,
    pool: Pool,
    held: Mapping[str, HeldPrefix],
    *,
    fingerprint: bytes,
    least_new_tokens: int,
) -> PairQuotes:
    """Quote pairs. `least_new_tokens`: a worker that would have to compute fewer tokens than this gets no prefill
    worker."""
    prompt_alone = replace(prompt, output_tokens=0)
    prefills = quote_candidates(prompt_alone, pool, held, fingerprint=fingerprint, candidates=pool.prefillers)
    decoders = quote_candidates(prompt, pool, held, fingerprint=fingerprint, candidates=pool.decoders)
    sources: dict[_KvSource, int] = {}
    groups = [sources.setdefault(_KvSource.of(quote.candidate), len(sources)) for quote in prefills]
    decodes: list[Quote] = []
    prices_us: list[list[float | None]] = []
    for whole in decoders if prefills else ():
        short = prompt.input_tokens - whole.cached_tokens < least_new_tokens
        if short and serves_whole(whole.candidate.endpoint):
            continue
        nearness = [_is_near(whole.candidate, source) for source in sources]
        ways = [
            None if near is None else (near, source.block_bytes) for near, source in zip(nearness, sources, strict=True)
        ]
        by_way = {way: _decode_quote(whole, *way) for way in dict.fromkeys(ways) if way is not None}
        if by_way:
            decodes.append(next(iter(by_way.values())))
            prices_us.append([None if way is None else by_way[way].base_us for way in ways])
    wholes = [quote for quote in decoders if serves_whole(quote.candidate.endpoint)]
    return PairQuotes(prefills, decodes, wholes, groups, prices_us)


class PairRanking:
    """The choice among a request's pairs and single workers, and the alternatives, which are priced only when they are
    read."""

    def __init__(self, quotes: PairQuotes, evaluation: Evaluation, criteria: Criteria) -> None:
        self._quotes = quotes
        self._evaluation = evaluation
        self._criteria = criteria
        self._first_decode = len(quotes.prefills)
        self._first_whole = len(quotes.prefills) + len(quotes.decodes)

    @property
    def prefill(self) -> SelectionResult | None:
        """The worker that computes only the prompt; None if one worker computes both."""
        return None if self._evaluation.prefill is None else self.prefills[0]

    @property
    def decode(self) -> SelectionResult:
        """The worker that computes the answer, including the transfer; without a prefill worker, including the prompt."""
        return (self.wholes if self._evaluation.prefill is None else self.decodes)[0]

    @property
    def alternative(self) -> "Alternative | None":
        """The cheapest choice of the other kind: one worker for both, or a pair, whose prefill is the cheapest or nearly
        so."""
        if self._evaluation.prefill is not None:
            return Alternative(None, self.wholes[0]) if self.wholes else None
        return Alternative(self.prefills[0], self.decodes[0]) if self.decodes else None

    @cached_property
    def prefills(self) -> RankedResults:
        """Every worker that may compute only the prompt."""
        return self._rank_slice(self._quotes.prefills, 0, self._evaluation.prefill)

    @cached_property
    def wholes(self) -> RankedResults:
        """Every worker that may compute both."""
        chosen = self._evaluation.chosen - self._first_whole if self._evaluation.prefill is None else None
        return self._rank_slice(self._quotes.wholes, self._first_whole, chosen)

    @cached_property
    def decodes(self) -> RankedResults:
        """Every worker that may compute only the answer, with the KV from the chosen prefill worker or, if none is chosen,
        from the cheapest."""
        if not self._quotes.prefills:
            return RankedResults([], [])
        pairs, evaluation = self._quotes, self._evaluation
        number = evaluation.prefill
        if number is None:
            best = self.prefills[0].worker_id
            number = next(i for i, quote in enumerate(pairs.prefills) if quote.id == best)
        prefill = pairs.prefills[number].candidate
        source = _KvSource.of(prefill)
        quotes: list[Quote] = []
        by_offer: list[OfferEvaluation] = []
        chosen: int | None = None
        for i, quote in enumerate(pairs.decodes):
            near = _is_near(quote.candidate, source)
            if near is None:
                continue
            mine = evaluation.by_offer[self._first_decode + i]
            load = mine.load._replace(queued_prefill_tokens=0, waiting_requests=0)
            if evaluation.prefill is not None and evaluation.chosen == self._first_decode + i:
                chosen = len(quotes)
            quotes.append(_decode_quote(quote, near, source.block_bytes)._replace(source=prefill.id))
            by_offer.append(mine._replace(load=load))
        criteria = self._criteria._replace(interference_factor=0.0)  # no prompt is computed there
        return RankedResults(quotes, by_offer, chosen=chosen, criteria=criteria)

    def _rank_slice(self, quotes: Sequence[Quote], first: int, chosen: int | None) -> RankedResults:
        by_offer = self._evaluation.by_offer[first : first + len(quotes)]
        if chosen is not None:
            quotes = with_source(quotes, quotes[chosen].id, self._evaluation.source)
        return RankedResults(quotes, by_offer, chosen=chosen, criteria=self._criteria)


class Alternative(NamedTuple):
    """The cheapest choice of the other kind, the one that was not chosen."""

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


def _transfer_groups(worker: EngineEndpoint) -> frozenset[str]:
    return frozenset(worker.transfer_groups or ("",))


def _is_near(reader: Candidate, source: _KvSource) -> bool | None:
    """True if the source is in the reader's locality domain; None if its KV can't be read."""
    if source.block_size != reader.block_size or not source.transfer_groups & _transfer_groups(reader.endpoint):
        return None
    if source.protocol is not TransferProtocol.of(reader.endpoint.kind):
        return None
    return source.locality_domain == reader.endpoint.locality_domain


def _decode_quote(quote: Quote, near: bool, block_bytes: int) -> Quote:
    """A quote for only the answer: tokens that the worker does not hold are read from a prefill worker, whose blocks have
    `block_bytes` bytes (0: unknown)."""
    for_kind, usable = quote.for_kind, quote.usable_tokens
    own = for_kind.pieces(quote.held.runs, 0, usable)
    rest = for_kind.prompt.input_tokens - usable
    kv_bytes = for_kind.kv_bytes(usable, usable + rest, Tier.HBM, block_bytes)
    transfers = [Piece(rest, kv_bytes, Tier.HBM, own=False, same_domain=near)] if rest else []
    base_us, work_us = for_kind.price_pieces([*own, *transfers])
    return quote._replace(
        base_us=base_us,
        work_us=work_us,
        transfers=transfers,
        source=None,
        reads_store=False,
        surcharges=(),
        surcharge_us=0,
        equal_sources=(),
    )


def _decode_offer(offer: Offer, quote: Quote) -> Offer:
    """An offer for only the answer: no prompt is computed, and the cost of the answer without load is the pair's price."""
    kind = offer.kind._replace(chain=None, prices=offer.kind.prices._replace(queued_us=0.0))
    return offer._replace(kind=kind, base_us=float(quote.surcharge_us), work_us=0.0, fetching=None)
