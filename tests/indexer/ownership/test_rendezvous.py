from hypothesis import given
from hypothesis import strategies as st

from kvatlas_indexer.ownership.rendezvous import target_partitions, targets

members = st.lists(st.text("abcdefgh0123-", min_size=1, max_size=12), min_size=1, max_size=8, unique=True)


@given(members, st.integers(1, 128))
def test_every_partition_has_one_owner_among_the_members(names: list[str], partitions: int) -> None:
    owners = targets(names, partitions)
    assert sorted(owners) == list(range(partitions))
    assert set(owners.values()) <= set(names)
    shares = [target_partitions(name, names, partitions) for name in names]
    assert sorted(p for share in shares for p in share) == list(range(partitions))


@given(members)
def test_the_order_of_members_does_not_matter(names: list[str]) -> None:
    assert targets(names, 64) == targets(list(reversed(names)), 64)


@given(members, st.text("xyz", min_size=1, max_size=5))
def test_only_partitions_of_the_member_that_comes_or_goes_move(names: list[str], new: str) -> None:
    before, after = targets(names, 64), targets([*names, new], 64)
    assert all(after[p] in (before[p], new) for p in before)


def test_two_members_get_about_half_each() -> None:
    assert 20 <= len(target_partitions("a", ["a", "b"], 64)) <= 44


def test_without_members_no_partition_has_an_owner() -> None:
    assert targets([], 64) == {}
