"""One process's memory of objects, compared with plain lists."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.engine_objects.known_holders import KnownHolders

MOST = 20

puts = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 60), st.integers(1, 5), st.sampled_from("xy")),
    max_size=60,
)


@given(puts)
def test_the_tenants_with_the_most_lose_their_oldest(puts: list[tuple[str | None, int, int, str]]) -> None:
    known = KnownHolders(MOST)
    kept: dict[str | None, dict[str, str]] = {}
    for tenant, first, count, worker in puts:
        new = {f"r{number}": worker for number in range(first, first + count)}
        known.add(tenant, new)
        kept[tenant] = {id: held for id, held in kept.get(tenant, {}).items() if id not in new} | new
        before = sum(map(len, kept.values()))
        for id_of in kept:
            found = [id for id in kept[id_of] if known.find(id_of, id) is not None]
            assert found == list(kept[id_of])[len(kept[id_of]) - len(found) :], "the newest are kept"
            assert all(known.find(id_of, id) == kept[id_of][id] for id in found)
            if len(found) < len(kept[id_of]):
                assert before > MOST and len(found) >= MOST * 0.9 / len(kept) - 1, "no less than an equal part"
            kept[id_of] = {id: kept[id_of][id] for id in found}
        assert sum(map(len, kept.values())) <= MOST
