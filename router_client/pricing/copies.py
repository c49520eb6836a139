"""Copies: what a worker could read of a prompt beyond its own blocks, from a shared store or from another worker.

Another worker's copy counts only if the request makes the engine fetch it. So both engines have the same connector
(`EngineEndpoint.kv_connector`), the source reports the address to fetch from and the tiers that can be fetched, and the
request can name the source (`Prompt.fetch_by`) unless the engine finds it on its own. Both also share a transfer group (or
name none), and their blocks and marks have the same form: nothing is fetched that the reader could not use. The deepest
copies are considered, and among these the ones with the fewest bytes; among equals, the booking chooses
(`kvatlas.reservations.protocol.Fetching`). If the source does not know a copy's size, the reader's is assumed, so such a copy
is compared with the others for each reader.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.protocol import Piece, ReadRate, TermKind
from kvatlas.fleet.records import EngineEndpoint, KvConnector
from kvatlas.reservations.protocol import MOST_SOURCES
from router_client.pricing.overlap import HeldPrefix, Run
from router_client.pricing.pool import Pool, meeting_form
from router_client.pricing.quotes import Quote, Surcharge
from router_client.prompt import Prompt

DISPLACED = TermKind("displaced", "tokens")
NOT_FETCHED = TermKind("not_fetched", "tokens")


@dataclass(frozen=True, slots=True)
class _Copy:
    """`reads`: what is read for each run: its tokens, its tier, and the bytes per block (0: as in the reader)."""

    source: EngineEndpoint
    prefix: HeldPrefix
    reads: tuple[tuple[int, Tier, int], ...]

    @classmethod
    def of(cls, source: EngineEndpoint, prefix: HeldPrefix) -> "_Copy":
        nearest = ((run.tokens, run.tiers[0]) for run in prefix.runs)
        return cls(source, prefix, tuple((tokens, tier, source.bytes_in(tier.label)) for tokens, tier in nearest))

    @property
    def sized(self) -> bool:
        """True if the copy's price does not depend on the size of the reader's blocks in bytes."""
        return all(size for _, _, size in self.reads)

    @property
    def depth(self) -> tuple[int, int]:
        """The depth of the copy, for comparison. Deeper is better; at equal depth, the copy whose farthest tier is
        nearer."""
        return self.prefix.copied_tokens, -max(tier for _, tier, _ in self.reads)

    @property
    def rank(self) -> tuple[tuple[int, int], tuple[int, ...]]:
        """The copy's rank; the highest one is read. At equal depth, that is the copy with fewer bytes in the farthest
        tier, then in nearer ones."""
        in_tier = dict.fromkeys(reversed(Tier), 0)
        for tokens, tier, size in self.reads:
            in_tier[tier] -= tokens * size
        return self.depth, tuple(in_tier.values())

    def is_equal(self, other: "_Copy") -> bool:
        """True if every reader pays the same for both."""
        same_domain = self.source.locality_domain == other.source.locality_domain
        return same_domain and self.reads == other.reads and self.prefix.reach_tokens == other.prefix.reach_tokens


class CopySources:
    """Finds the copies that a candidate may read; built once per request, so that the work grows with the number of workers,
    not with the number of pairs."""

    def __init__(self, prompt: Prompt, pool: Pool, held: Mapping[str, HeldPrefix]) -> None:
        self._held = held
        self._fetch_by = prompt.fetch_by | {KvConnector.LMCACHE}  # LMCache finds its source itself
        self._share = pool.fetches.share(prompt.scope.pool_id)
        self._displaced = pool.fetches.displaced_share(prompt.scope.pool_id, pool.capacity_tokens)
        self._stores = {endpoint.id: endpoint for endpoint in pool.stores if endpoint.id in held}
        self._deepest: dict[Hashable, dict[tuple[str | None, bool], list[_Copy]]] = {}
        """The copies that readers would read, by meeting point, then by domain (None: any) and `_Copy.sized`."""
        for source in pool.sources:
            if source.id in held and source.block_size:
                prefix = fetchable_prefix(held[source.id], source.kv_tiers)
                if prefix.copied_tokens:
                    self._add(_Copy.of(source, prefix))

    def add_best(self, quote: Quote) -> Quote:
        """The quote with the copy to read: the one in a shared store, unless a copy on another worker is cheaper."""
        reader = quote.candidate.endpoint
        best = self._read_store(quote, reader) if self._stores and reader.stores else quote
        if not self._deepest or reader.kv_connector not in self._fetch_by:
            return best
        unasked = reader.kv_connector is KvConnector.LMCACHE
        for equal in self._copies_for(reader, quote.held.copied_tokens):
            fetched = self._read(quote, equal[0].source, equal[0].prefix)
            if fetched is not None and (unasked or fetched.offered_us < best.offered_us):
                best, unasked = fetched._replace(equal_sources=tuple(copy.source.id for copy in equal)), False
        return best

    def _add(self, copy: _Copy) -> None:
        rank, sized = copy.rank, copy.sized
        for key in _meeting_points(copy.source):
            deepest = self._deepest.setdefault(key, {})
            for place in ((None, sized), (copy.source.locality_domain, sized)):
                known = deepest.get(place)
                if known is not None and known[0].is_equal(copy):
                    known.append(copy)
                elif known is None or rank >= known[0].rank:
                    deepest[place] = [copy]

    def _copies_for(self, reader: EngineEndpoint, own_tokens: int) -> Iterator[Sequence[_Copy]]:
        """Copies that are deeper than the reader's own, in up to two groups of equals: the deepest ones, and the deepest
        ones in the reader's domain. Each group includes equally deep copies of unknown size."""
        seen: set[str] = set()
        for key in _meeting_points(reader):
            for domain in (reader.locality_domain, None):
                deepest = self._deepest.get(key, {})
                found = [equal for sized in (True, False) if (equal := deepest.get((domain, sized)))]
                depth = max((equal[0].depth for equal in found), default=(0, 0))
                if depth[0] <= own_tokens:
                    continue
                for equal in found:
                    if equal[0].depth == depth and equal[0].source.id not in seen:
                        seen.add(equal[0].source.id)
                        yield equal if len(equal) <= MOST_SOURCES else _some_for(reader, equal)

    def _read(self, quote: Quote, source: EngineEndpoint, prefix: HeldPrefix) -> Quote | None:
        """The quote with what the source holds beyond the worker's own blocks; None if it holds nothing more."""
        for_kind, reader = quote.for_kind, quote.candidate.endpoint
        reach = for_kind.usable_tokens(prefix)
        if reach <= quote.usable_tokens:
            return None
        near = source.locality_domain == reader.locality_domain
        rate = _read_rate(source)
        transfers = for_kind.pieces(prefix.runs, quote.usable_tokens, reach, source=source, same_domain=near, rate=rate)
        own = for_kind.pieces(quote.held.runs, 0, quote.usable_tokens)
        base_us, work_us = for_kind.price_pieces([*own, *transfers])
        read = quote._replace(
            base_us=base_us, work_us=work_us, transfers=transfers, source=source.id, reads_store=source.is_store
        )
        return read if source.is_store else self._with_surcharges(read, quote.base_us, own)

    def _with_surcharges(self, read: Quote, otherwise_us: float, own: Sequence[Piece]) -> Quote:
        """The quote with its surcharges. `otherwise_us`: what the request would cost there if the worker computed what it
        is to fetch; `own`: the reads of its own blocks."""
        tokens = read.transferred_tokens
        at_hand_us, _ = read.for_kind.price_pieces([*own, Piece(tokens, 0, Tier.HBM)])
        computing_us = max(0.0, otherwise_us - at_hand_us)
        added = [Surcharge(DISPLACED, us, tokens)] if (us := round(self._displaced * computing_us)) else []
        if (lost := 1 - self._share) > 0:
            added.append(Surcharge(NOT_FETCHED, round(lost * computing_us), round(lost * tokens)))
        transfer_us = max(0, round(read.base_us - at_hand_us))
        return read._replace(
            surcharges=tuple(added), surcharge_us=sum(one.us for one in added), transfer_us=transfer_us
        )

    def _read_store(self, quote: Quote, reader: EngineEndpoint) -> Quote:
        """The quote with what the deepest of the reader's shared stores holds beyond the reader's own blocks. Among equally
        deep stores, the one that can be read fastest counts.

        A worker with marks reads nothing from a store, which does not report the blocks of its other groups.
        """
        shape = reader.block_size, reader.lookahead_tokens
        if reader.marks:
            return quote
        reads = [
            read
            for id in reader.stores
            if (store := self._stores.get(id)) is not None
            and (store.block_size, store.lookahead_tokens) == shape
            and (read := self._read(quote, store, self._held[id])) is not None
        ]
        return min(reads, key=lambda read: (-read.transferred_tokens, read.base_us), default=quote)


def _some_for(reader: EngineEndpoint, equal: Sequence[_Copy]) -> Sequence[_Copy]:
    """MOST_SOURCES of these copies; different readers get different ones."""
    first = crc32(reader.id.encode()) % len(equal)
    return [*equal[first:], *equal[:first]][:MOST_SOURCES]


def _meeting_points(worker: EngineEndpoint) -> list[Hashable]:
    """The meeting points of a worker, one for each transfer group. Two workers that have one in common can use each
    other's blocks."""
    form = meeting_form(worker)
    return [(group, form) for group in worker.transfer_groups or ("",)]


@lru_cache(maxsize=16_384)
def fetchable_prefix(held: HeldPrefix, labels: Sequence[str]) -> HeldPrefix:
    """The part of a held prefix that is in tiers with these labels, without a gap from its start. It is empty if that is less
    than its marks need, because it is not known where earlier marks would let an engine resume."""
    runs: list[Run] = []
    for run in held.runs:
        found = tuple(tier for tier in run.tiers if tier.label in labels)
        if not found:
            break
        runs.append(Run(run.tokens, found))
    if sum(run.tokens for run in runs) < held.copied_tokens and held.reach_tokens is not None:
        return HeldPrefix()
    return HeldPrefix.of(tuple(runs), held.reach_tokens)


def _read_rate(source: EngineEndpoint) -> ReadRate | None:
    """The read rate that a shared store reports."""
    setup_us, us_per_mib = source.read_setup_us, source.read_us_per_mib
    return None if setup_us is None and us_per_mib is None else ReadRate(setup_us or 0, us_per_mib or 0)
