"""An ask, and a request that may wait, in the form that a pool's functions in the store read."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import msgpack

from kvatlas.index.redis.keys import ShardKeys
from kvatlas.reservations.lookup import Lookup
from kvatlas.reservations.protocol import Ask, LookAlikes, OfferKind
from kvatlas.reservations.room_and_slo import Limits
from kvatlas.reservations.waiting_request import WaitingRequest, digest

_packer = msgpack.Packer(use_bin_type=False)
"""Uses msgpack's older form, in which text and bytes are one type, because the store's Lua reads byte strings only in that
form."""


def pack(value: Any) -> bytes:
    """A value in the form that the store's Lua reads."""
    packed: bytes = _packer.pack(value)
    return packed


def _pack_fields(*values: Any) -> bytes:
    """The fields of a list of up to 15, without its head: several of these, joined after one head, make up one list."""
    return pack(values)[1:]


def _head(fields: int) -> bytes:
    """The head of a list of up to 15 fields (msgpack's fixarray)."""
    return bytes([0x90 | fields])


_ASK_HEAD, _LOOKUP_HEAD = _head(13), _head(11)
_NO_FETCHES = _pack_fields([], [])


def pack_ask(ask: Ask, lookup: bytes) -> bytes:
    """An ask in the form that `functions/_evaluation.lua` reads. `lookup`: packed, in the form that `functions/_lookup.lua`
    reads."""
    chains = [(cut.step_tokens, cut.hashes) for cut in ask.chains]
    numbers: dict[int, int] = {}
    kinds: list[Any] = []
    offers: list[Any] = []
    look_alikes: list[Any] = []

    def number_of(kind: OfferKind) -> int:
        if (number := numbers.get(id(kind))) is None:
            number = numbers[id(kind)] = len(numbers)
            kinds.extend(_kind_fields(kind))
        return number

    for worker_id, kind, held_steps, cached_tokens, base_us, work_us, _ in ask.offers:
        offers += (worker_id, number_of(kind), held_steps, cached_tokens, base_us, work_us)
    for likeness, (_, kind, held_steps, cached_tokens, base_us, work_us, _), _ in ask.look_alikes:
        look_alikes += (likeness, number_of(kind), held_steps, cached_tokens, base_us, work_us)
    layout, skipped = ask.pair_layout, list(ask.skipped)
    if skipped and ask.offers:  # a worker with its own offer must not count twice
        skipped = list(set(skipped).difference(offer.worker_id for offer in ask.offers))
    before = _pack_fields(
        ask.again_factor,
        chains,
        kinds,
        offers,
        0 if ask.limits is None else _limit_fields(ask.limits, ask.look_alikes),
        0 if layout is None else (layout.prefills, layout.decodes, layout.groups, layout.transfers_us),
        look_alikes,
        skipped,
        ask.least_members,
        ask.ring,
    )
    fetches = _NO_FETCHES if ask.lookup is not None else _pack_fields(*_fetch_fields(ask))
    return b"".join((_ASK_HEAD, before, lookup, fetches))


def pack_lookup(lookup: Lookup, keys: ShardKeys, odd: bytes) -> bytes:
    """A lookup in the form that `functions/_lookup.lua` reads; `odd`: its odd workers, packed."""
    chains = lookup.distinct_chains
    numbers = {id(one): number for number, one in enumerate(chains, 1)}
    reuse: list[float] = []
    for one, (most, lost, loses_first, share, unit) in zip(lookup.chains, lookup.reuse, strict=True):
        reuse += (numbers.get(id(one), 0), most, lost, int(loses_first), share, unit)
    place = _index_fields(keys, lookup.scope.scope_id)
    before = _pack_fields([(one.tokens, one.hashes) for one in chains], reuse)
    after = _pack_fields(lookup.home or "", lookup.home_us, flat_rows(lookup.named))
    return b"".join((_LOOKUP_HEAD, place, before, odd, after))


@lru_cache(maxsize=4_096)
def _index_fields(keys: ShardKeys, scope_id: bytes) -> bytes:
    """The keys that a lookup in a scope reads, and the scope's id."""
    return _pack_fields(keys.blocks(scope_id), keys.active, keys.workers, keys.held, scope_id)


def flat_rows(row_of: Mapping[str, int]) -> list[str | int]:
    """The workers of a lookup, each with the number of its row."""
    return [part for worker_id, row in row_of.items() for part in (worker_id, row + 1)]


def waiting_row(request: WaitingRequest) -> tuple[Any, ...]:
    """A request in the form that `functions/_queue.lua` reads."""
    return (
        request.id,
        digest(request.tenant),
        request.weight_milli,
        request.rank,
        digest(request.program) if request.program else "",
        request.input_tokens,
        request.output_tokens,
        max(0, request.age_us),
        max(0, request.left_us),
        request.lane,
        0 if request.workers is None else sorted(request.workers),
        *request.limits,
        int(request.may_wait),
    )


def _fetch_fields(ask: Ask) -> tuple[list[str], list[tuple[Any, ...]]]:
    """All sources, each once, and the fetches of the offers, then those of the look-alikes; a fetch is a row number (from 1), a
    time in us, and the numbers of its sources."""
    numbers: dict[str, int] = {}
    fetching = chain((one.fetching for one in ask.offers), (one.offer.fetching for one in ask.look_alikes))
    rows = [
        (row, one.us, *(numbers.setdefault(source, len(numbers) + 1) for source in one.sources))
        for row, one in enumerate(fetching, start=1)
        if one is not None
    ]
    return list(numbers), rows


def _kind_fields(kind: OfferKind) -> tuple[float, ...]:
    chain, limit_tokens, lost_tokens, prices, *others = kind
    return (0 if chain is None else chain + 1, limit_tokens, lost_tokens, *prices, *others)


def _limit_fields(limits: Limits, look_alikes: Sequence[LookAlikes]) -> tuple[Any, ...]:
    return (
        limits.ttft_us,
        limits.decode_us,
        limits.slo_factor,
        int(limits.slo_filters),
        limits.input_tokens,
        list(chain.from_iterable(limits.of_offers)),
        int(limits.look_alikes_have_room),
        [each.decode_us for each in look_alikes],
    )
