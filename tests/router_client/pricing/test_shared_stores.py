"""Shared stores: they are read by the workers that name them, priced as transfers, and are not candidates themselves."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile
from kvatlas.fleet.records import EngineKind, EngineState, FleetRecord, Liveness
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.request import SelectionResult
from router_client import Prompt, RouterClient, RouterSettings, StaticFleet
from router_client.pricing.look_alikes import LEAST_CANDIDATES, quote_look_alikes
from router_client.pricing.overlap import HeldPrefix, Run
from router_client.pricing.pool import Pool
from router_client.pricing.quote_desk import quote_candidates
from router_client.pricing.ranking import rank
from tests.router_client.pools import FETCH_BY, PEER, SCOPE, hold, pool, worker

PROMPT = Prompt(SCOPE, 1_000, tokens=range(1_000), output_tokens=10, fetch_by=FETCH_BY)


def store(id: str = "s", **fields: Any) -> FleetRecord:
    return worker(id, kind=EngineKind.STORE, **fields)


def held(tokens: int, tier: Tier = Tier.OBJECT_STORE) -> HeldPrefix:
    return HeldPrefix.of((Run(tokens, (tier,)),))


def results(*records: FleetRecord, **prefixes: HeldPrefix) -> dict[str, SelectionResult]:
    ranking = rank(PROMPT, Pool.of(pool(*records), None, EngineProfile()), prefixes)
    return {result.worker_id: result for result in ranking}


def test_a_worker_that_names_a_store_reads_what_it_does_not_hold_itself() -> None:
    found = results(
        worker("reader", stores=("s",)),
        worker("warm", stores=("s",)),
        worker("other"),
        store(),
        warm=held(320, Tier.HBM),
        s=held(640),
    )
    assert set(found) == {"reader", "warm", "other"}
    assert (found["reader"].usable_tokens, found["reader"].transferred_tokens, found["reader"].source) == (0, 640, "s")
    assert (found["warm"].usable_tokens, found["warm"].transferred_tokens) == (320, 320)
    assert (found["other"].source, found["other"].cached_tokens) == (None, 0)
    assert found["reader"].source_kind == "store"
    assert "640 more read from store s" in found["reader"].explain()


def test_a_read_of_a_store_is_a_transfer_at_the_stores_own_rate() -> None:
    """It reads 40 blocks of 1 MiB."""
    transfers = {
        rate: {term.name: term.us for term in results(worker("r", stores=("s",)), record, s=held(640))["r"].terms}
        for rate, record in {"tier": store(), "own": store(read_setup_us=1_000, read_us_per_mib=100)}.items()
    }
    assert transfers["tier"]["transfer"] == 20_000 + 40 * (1_250 + 25)  # an object store, over the network
    assert transfers["own"]["transfer"] == 1_000 + 40 * 100


def test_an_engine_reads_its_store_even_if_computing_were_faster() -> None:
    found = results(worker("reader", stores=("s",)), worker("other"), store(read_us_per_mib=100_000), s=held(640))
    assert found["reader"].transferred_tokens == 640
    assert found["reader"].score_us > found["other"].score_us


def test_a_cheaper_copy_on_another_worker_is_read_instead() -> None:
    found = results(
        worker("reader", stores=("s",), **PEER),
        worker("peer", **PEER),
        store(),
        peer=held(640, Tier.HBM),
        s=held(640),
    )
    assert (found["reader"].source, found["reader"].source_kind) == ("peer", "worker")


@pytest.mark.parametrize(
    "unreadable",
    [
        store(liveness=Liveness.LOST),
        store(state=EngineState.DOWN),
        store(block_size=32),
        store(lookahead_tokens=1),
        worker("s"),
    ],
    ids=["lost", "down", "another block size", "other hashes", "no store"],
)
def test_nothing_is_read_of_a_store_that_can_not_be_read(unreadable: FleetRecord) -> None:
    assert results(worker("reader", stores=("s",)), unreadable, s=held(640))["reader"].source is None


def test_a_worker_with_marks_reads_nothing_of_a_store_which_has_none() -> None:
    assert results(worker("reader", stores=("s",), marks=True), store(), s=held(640))["reader"].source is None


def test_a_store_gets_no_requests_and_is_not_called_left_out() -> None:
    read = Pool.of(pool(worker("w"), store()))
    assert [candidate.id for candidate in read.candidates] == ["w"]
    assert not read.left_out
    assert not read.narrow(lambda endpoint: "unwanted" if endpoint.is_store else None).left_out


@given(
    prefixes=st.dictionaries(
        st.sampled_from(["s", "t", *(f"w{n:02}" for n in range(LEAST_CANDIDATES + 4))]), st.integers(1, 62)
    ),
    readers=st.lists(
        st.sampled_from([(), ("s",), ("t", "s"), ("s", "t")]),
        min_size=LEAST_CANDIDATES,
        max_size=LEAST_CANDIDATES + 4,
    ),
    peer=st.sampled_from([{}, PEER]),
    rate=st.sampled_from([None, 0, 60_000]),
)
def test_the_few_quotes_of_a_large_pool_are_those_of_a_full_scan(
    prefixes: dict[str, int], readers: list[tuple[str, ...]], peer: Mapping[str, Any], rate: int | None
) -> None:
    workers = [worker(f"w{n:02}", stores=stores, **peer) for n, stores in enumerate(readers)]
    read = Pool.of(pool(*workers, store("s"), store("t", read_us_per_mib=rate, locality_domain="b")))
    copies = {id: held(16 * blocks, Tier.CPU_DRAM) for id, blocks in prefixes.items()}
    full = {quote.id: quote for quote in quote_candidates(PROMPT, read, copies)}
    few = quote_look_alikes(PROMPT, read, copies, b"")
    assert few is not None
    named = {quote.id: quote for quote in few.named}
    for candidate in read.candidates:
        quote = named.get(candidate.id) or few.look_alikes[candidate.likeness]
        scanned = full[candidate.id]
        assert (quote.base_us, quote.work_us) == (scanned.base_us, scanned.work_us)
        assert (quote.cached_tokens, quote.source) == (scanned.cached_tokens, scanned.source)


@pytest.mark.anyio
async def test_the_choice_weighs_a_store_against_a_queue() -> None:
    """A worker that holds the prompt but is busy, one that can read it from a store, and one that would compute it."""
    index = MemoryIndex()
    records = pool(
        worker("holder", load={"queued_prefill_tokens": 20_000}),
        worker("reader", load={}, stores=("s",)),
        worker("cold", load={}),
        store(read_us_per_mib=10),
    )
    await hold(index, records["holder"], range(1_000))
    await hold(index, records["s"], range(1_000), tier=Tier.OBJECT_STORE)
    router = RouterClient(index, StaticFleet(records), RouterSettings(deadline_ms=None))
    choice = await router.reserve(PROMPT, dry_run=True)
    assert (choice.worker_id, choice.source, choice.source_kind) == ("reader", "s", "store")
    assert choice.predicted_cached_tokens == 992
    overlap = {one.worker_id: one for one in await router.overlap(PROMPT)}
    assert (overlap["s"].kind, overlap["s"].resident_tokens, overlap["s"].routable) == ("store", 992, False)
    assert overlap["s"].explain().startswith("store s: 62 of 63 blocks")
