"""A later read of a pool: what is kept from the earlier one equals what would be computed again."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.fleet.records import EngineState, FleetRecord, Liveness, Role
from router_client.pricing.pool import Pool
from tests.router_client.pools import pool, worker

LOADS = st.none() | st.fixed_dictionaries(
    {"running_decodes": st.integers(0, 2)},
    optional={
        "queued_prefill_tokens": st.just(100),
        "forward_pass": st.fixed_dictionaries(
            {"total_request_slots": st.integers(0, 1), "total_kv_blocks": st.integers(0, 1)}
        ),
    },
)


@st.composite
def records(draw: st.DrawFn) -> Mapping[str, FleetRecord]:
    return pool(
        *(
            worker(
                id,
                state=draw(st.sampled_from((EngineState.UP, EngineState.UP, EngineState.DOWN))),
                liveness=draw(st.sampled_from((Liveness.ALIVE, Liveness.ALIVE, Liveness.LOST))),
                load=draw(LOADS),
                role=draw(st.sampled_from((Role.BOTH, Role.BOTH, Role.DECODE))),
                events=draw(st.booleans()),
                labels=draw(st.sampled_from(({}, {"zone": "a"}))),
            )
            for id in draw(st.sampled_from((("w1",), ("w1", "w2"), ("w2", "w3"))))
        )
    )


@given(records(), records())
def test_a_pool_read_again_is_the_pool_of_the_new_records(
    before: Mapping[str, FleetRecord], after: Mapping[str, FleetRecord]
) -> None:
    again = Pool.of(before).read_again(after)
    assert again is None or again == Pool.of(after)


@given(records(), st.integers(0, 9))
def test_another_load_is_no_reason_to_work_out_the_pool_again(before: Mapping[str, FleetRecord], running: int) -> None:
    after = {
        id: record.model_copy(
            update={
                "heard_us": 7,
                "load": record.load and record.load.model_copy(update={"running_decodes": running, "sampled_us": 5}),
            }
        )
        for id, record in before.items()
    }
    known = Pool.of(before)
    again = known.read_again(after)
    assert again is not None and again.candidates is known.candidates and again.groups is known.groups
    assert again == Pool.of(after)


@given(
    st.lists(st.sampled_from(((), ("acme",), ("a*", "b"), ("other",))), min_size=1, max_size=9),
    st.sampled_from(("acme", "acme/salt", "b", "default", "other", "")),
)
def test_a_tenant_has_the_workers_that_may_see_it(tenants: list[tuple[str, ...]], tenant_id: str) -> None:
    """It also has their groups of look-alikes, complete."""
    workers = pool(*(worker(f"w{number}").model_copy(update={"tenants": of}) for number, of in enumerate(tenants)))
    allowed = {id for id, record in workers.items() if record.may_see(tenant_id)}
    whole = Pool.of(workers)
    found = whole.of_tenant(tenant_id)
    assert {candidate.id for candidate in found.candidates} == allowed == set(found.candidate_of)
    assert {id for group in found.groups for id in (*group.ids, *group.odd)} == allowed
    assert not found.skipped and set(found.left_out) == set(workers) - allowed
    assert found is whole or found is whole.of_tenant(tenant_id)
    again = whole.read_again({id: record.model_copy(update={"heard_us": 9}) for id, record in workers.items()})
    assert again is not None and {candidate.id for candidate in again.of_tenant(tenant_id).candidates} == allowed
