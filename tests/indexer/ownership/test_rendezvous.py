from hypothesis import given
from hypothesis import strategies as st

from indexer.ownership.rendezvous import target_partitions, targets

members = st.lists(st.text("abcdefgh0123-", min_size=1, max_size=12), min_size=1, max_size=8, unique=True)


@given(members, st.integers(1, 128))
def test_every_partition_has_one_owner_among_the_members(names: list[str], partitions: int) -> None:
    owners = targets(names, partitions)
    assert sorted(owners) == list(range(partitions))
    assert set(owners.values()) <= set(names)
    shares = [target_partitions(name, names, partitions) for name in names]
    assert sorted(p for share in shares for p in share) == list(range(partitions))


@given(members)
def test_it_does_not_depend_on_the_order_of_members(names: list[str]) -> None:
    assert targets(names, 64) == targets(list(reversed(names)), 64)


@given(members, st.text("xyz", min_size=1, max_size=5))
def test_a_new_member_only_takes_and_a_gone_one_only_gives(names: list[str], new: str) -> None:
    before, after = targets(names, 64), targets([*names, new], 64)
    assert all(after[p] in (before[p], new) for p in before)


def test_two_members_share_fairly() -> None:
    assert 20 <= len(target_partitions("a", ["a", "b"], 64)) <= 44


def test_without_members_nobody_owns_anything() -> None:
    assert targets([], 64) == {}
