"""The cost of a request on each worker, computed only from docs/router-reference.md: token by token, with its numbers, trying
every worker as a source. Nothing of `kvatlas.cost`, `kvatlas.blocks.reuse` or the ranking is used."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile
from math import ceil

from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness, Role

MIB = 1 << 20
SET_UP_AND_MIB = {
    Tier.REMOTE_HBM: (100, 25),
    Tier.CPU_DRAM: (50, 50),
    Tier.LOCAL_SSD: (200, 200),
    Tier.OBJECT_STORE: (20_000, 1_250),
}
DISPLACED = 0.3
A_MIB = {Tier.REMOTE_HBM: 20, Tier.CPU_DRAM: 55, Tier.LOCAL_SSD: 280, Tier.OBJECT_STORE: 1_800}


@dataclass(frozen=True)
class Busy:
    """Running requests, queued tokens, waiting requests whose tokens are unknown, tokens of KV in use."""

    running: int = 0
    queued: int = 0
    waiting: int = 0
    kv: int = 0

    def __add__(self, other: "Busy") -> "Busy":
        return Busy(
            self.running + other.running, self.queued + other.queued, self.waiting + other.waiting, self.kv + other.kv
        )


@dataclass(frozen=True)
class Part:
    """Tokens read in one go from one tier of one worker."""

    tokens: int
    bytes: int
    tier: Tier
    own: bool
    near: bool
    rate: tuple[int, int] | None = None

    @property
    def at_hand(self) -> bool:
        return self.own and self.tier is Tier.HBM

    @property
    def priced_as(self) -> Tier:
        return Tier.REMOTE_HBM if self.tier is Tier.HBM and not self.own else self.tier


def scores(
    profile: str,
    workers: Mapping[str, FleetRecord],
    held: Mapping[str, Sequence[Tier]],
    input_tokens: int,
    output_tokens: int,
    booked: Mapping[str, Busy] | None = None,
    interference: float = 0.4,
) -> dict[str, int]:
    """Each candidate's score in microseconds. `held`: the nearest tier of each of the prompt's tokens that a worker holds;
    `booked`: routers' bookings on workers, with their prefill still to come."""
    cost = {"engine": engine, "quillcache": quillcache}[profile]
    able = {id: r.endpoint for id, r in workers.items() if r.liveness is Liveness.ALIVE and r.state is EngineState.UP}
    able = {id: endpoint for id, endpoint in able.items() if endpoint.kind is not EngineKind.STORE}
    whole = [id for id, worker in able.items() if worker.role is Role.BOTH]
    prompts_alone = [id for id, w in able.items() if w.role is Role.PREFILL and w.kind is not EngineKind.SGLANG]
    candidates = whole or prompts_alone
    reported = {id: reported_by(workers[id]) for id in candidates}
    mean = mean_of([busy for busy in reported.values() if busy is not None])
    found: dict[str, int] = {}
    for id in candidates:
        me, mine = workers[id].endpoint, held.get(id, ())
        busy = (reported[id] or mean) + (booked or {}).get(id, Busy())
        usable = reused(me, len(mine), input_tokens)
        own = cut(mine[:usable], me, me)
        alone = partial(cost, input_tokens=input_tokens, output_tokens=0, busy=Busy())
        ways: list[tuple[Sequence[Part], int]] = [(read_of_stores(workers, held, me, own, input_tokens, cost=alone), 0)]
        for source in sources(workers, held, me, len(mine)):
            theirs = fetched(workers[source].endpoint, held[source])
            reach = reused(me, len(theirs), input_tokens)
            if reach > usable:
                computing = alone(own) - alone([*own, Part(reach - usable, 0, Tier.HBM, own=True, near=True)])
                parts = [*own, *cut(theirs[usable:reach], workers[source].endpoint, me)]
                ways.append((parts, round(DISPLACED * max(0, computing))))
        best, displaced = min(ways, key=lambda way: cost(way[0], input_tokens, output_tokens, busy) + way[1])
        found[id] = cost(best, input_tokens, output_tokens, busy) + displaced
        if profile == "engine" and me.role is not Role.PREFILL:  # every running request waits for this prompt
            found[id] += round(interference * cost(best, input_tokens, 0, Busy()) * busy.running)
    return found


def reported_by(record: FleetRecord) -> Busy | None:
    """A worker's reported load; waiting requests count if it does not report their tokens."""
    state = record.load
    if state is None:
        return None
    engine = state.forward_pass
    return Busy(
        state.running_decodes or engine.active_request_slots,
        state.queued_prefill_tokens,
        0 if state.queued_prefill_tokens else engine.requests_waiting,
        engine.active_kv_blocks * (record.endpoint.block_size or 1),
    )


def mean_of(known: Sequence[Busy]) -> Busy:
    """The load of a worker that reports none."""
    if not known:
        return Busy()
    n = len(known)
    return Busy(
        ceil(sum(b.running for b in known) / n),
        ceil(sum(b.queued for b in known) / n),
        ceil(sum(b.waiting for b in known) / n),
        ceil(sum(b.kv for b in known) / n),
    )


def reused(worker: EngineEndpoint, resident: int, prompt: int) -> int:
    """Number of a resident prefix's tokens that the engine does not compute again."""
    size = worker.block_size or 1
    if worker.kind is EngineKind.LMCACHE:
        return max(0, min(resident, prompt - 1))
    if worker.kind is EngineKind.SGLANG:
        return max(0, min(resident, prompt - (2 if worker.eagle else 1)) // size * size)
    whole = min(resident, prompt - 1) // size * size
    return max(0, whole - size if worker.eagle else whole)


def read_of_stores(
    workers: Mapping[str, FleetRecord],
    held: Mapping[str, Sequence[Tier]],
    me: EngineEndpoint,
    own: Sequence[Part],
    input_tokens: int,
    *,
    cost: Callable[[Sequence[Part]], int],
) -> Sequence[Part]:
    """What the engine reads whatever the cost: its own blocks, and after them those of the deepest shared store that it names;
    among equally deep ones, the cheapest."""
    usable = sum(part.tokens for part in own)
    reads: list[tuple[int, int, list[Part]]] = []
    for id in me.stores:
        store = workers.get(id)
        if store is None or store.endpoint.kind is not EngineKind.STORE or store.liveness is not Liveness.ALIVE:
            continue
        if (
            store.state not in (EngineState.UP, EngineState.DRAINING)
            or store.endpoint.block_size != me.block_size
            or not held.get(id)
        ):
            continue
        reach = reused(me, len(held[id]), input_tokens)
        if reach > usable:
            parts = [*own, *cut(held[id][usable:reach], store.endpoint, me)]
            reads.append((-reach, cost(parts), parts))
    return min(reads, key=lambda read: read[:2])[2] if reads else own


def sources(
    workers: Mapping[str, FleetRecord], held: Mapping[str, Sequence[Tier]], me: EngineEndpoint, mine: int
) -> list[str]:
    """In each transfer group, the deepest copy and the deepest one in the reader's domain; among equals, the one whose
    farthest tier is nearest, then the one with the fewest bytes, the farthest tier's first, then the last by name. Copies
    whose bytes their holder does not know are compared among themselves."""
    found = []
    for group in me.transfer_groups or ("",):
        givers = [
            id
            for id, record in sorted(workers.items())
            if fetched(record.endpoint, held.get(id, ()))
            and me.kv_connector is not None
            and record.endpoint.kv_connector is me.kv_connector
            and record.endpoint.kind is me.kind
            and group in (record.endpoint.transfer_groups or ("",))
            and record.endpoint.block_size == me.block_size
            and record.liveness is Liveness.ALIVE
            and record.state in (EngineState.UP, EngineState.DRAINING)
        ]
        for some in (givers, [id for id in givers if workers[id].endpoint.locality_domain == me.locality_domain]):
            if some:
                copies = {id: fetched(workers[id].endpoint, held[id]) for id in some}
                depth = max((len(copy), -max(copy)) for copy in copies.values())
                deepest = {
                    id: bytes_by_tier(workers[id].endpoint, copy)
                    for id, copy in copies.items()
                    if depth == (len(copy), -max(copy))
                }
                for known in (True, False):
                    alike = [(sizes, id) for id, (all_known, sizes) in deepest.items() if all_known == known]
                    if alike and depth[0] > mine:
                        fewest = min(alike)[0]
                        found.append(max(id for sizes, id in alike if sizes == fewest))
    return found


def bytes_by_tier(source: EngineEndpoint, tiers: Sequence[Tier]) -> tuple[bool, list[int]]:
    """Whether the source knows all of a copy's bytes, and the bytes that it knows, from the farthest tier on."""
    sizes = [source.tier_block_bytes.get(tier.label, source.block_bytes) for tier in tiers]
    return all(sizes), [
        sum(size for size, tier in zip(sizes, tiers, strict=True) if tier is one) for one in sorted(Tier, reverse=True)
    ]


def fetched(source: EngineEndpoint, held: Sequence[Tier]) -> Sequence[Tier]:
    """The part that others can fetch: up to the first token that is in none of the source's fetchable tiers."""
    return list(takewhile(lambda tier: tier.label in source.kv_tiers, held))


def cut(tiers: Sequence[Tier], holder: EngineEndpoint, reader: EngineEndpoint) -> list[Part]:
    """Tokens in runs of one tier; a block's size is from its holder's record, or else from its reader's."""
    own, near = holder.id == reader.id, holder.locality_domain == reader.locality_domain
    runs = [(tier, len(list(run))) for tier, run in groupby(tiers)]
    told = holder.read_setup_us, holder.read_us_per_mib
    rate = None if told == (None, None) else (told[0] or 0, told[1] or 0)
    sizes = {tier: holder.tier_block_bytes.get(tier.label, holder.block_bytes) for tier, _ in runs}
    others = {tier: reader.tier_block_bytes.get(tier.label, reader.block_bytes) for tier, _ in runs}
    size = reader.block_size or 1
    return [Part(n, ceil(n * (sizes[tier] or others[tier]) / size), tier, own, near, rate) for tier, n in runs]


def engine(parts: Sequence[Part], input_tokens: int, output_tokens: int, busy: Busy) -> int:
    """Score of profile `engine`."""
    cached = sum(part.tokens for part in parts)
    new = input_tokens - cached
    transfer = 0.0
    for part in parts:
        if part.at_hand:
            continue
        set_up, a_mib = part.rate or SET_UP_AND_MIB[part.priced_as]
        mib = (part.bytes or part.tokens * 131_072) / MIB
        transfer += set_up + a_mib * mib
        if part.rate is None and not part.own and part.priced_as is not Tier.REMOTE_HBM:
            transfer += 25 * mib  # the network
        if not part.own and not part.near:
            transfer += 350
    return (
        round(40 * (busy.queued + 1_024 * busy.waiting))
        + round(transfer)
        + round(40 * new + sum(0.0013 * (cached + i + 0.5) for i in range(new)))
        + output_tokens * 7_000
        + output_tokens * 40 * (busy.running + 1)
        + round(output_tokens * 0.045 * (busy.kv + input_tokens))
    )


def quillcache(parts: Sequence[Part], input_tokens: int, output_tokens: int, busy: Busy) -> int:
    """Score of profile `quillcache`."""
    reads = 0
    for part in parts:
        if part.at_hand:
            reads += 5
        else:
            reads += A_MIB[part.priced_as] * max(1, ceil(part.bytes / MIB))
            reads += 350 * (not part.own and not part.near)
    new = input_tokens - sum(part.tokens for part in parts)
    return 45 * new + reads + 4 * busy.queued + 80 * output_tokens + 1_500 * busy.running
