"""Shares of connections, against a plain count."""

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.http.connection_shares import RESERVE, RESERVE_SHARE, ConnectionShares, Place

MOST, SHARE = 6, 4
ADDRESSES = ("10.0.0.1", "10.0.0.2", "::ffff:10.0.0.2", "2001:db8::1", "2001:db8::2", None)
NETWORKS = ("a", "b", "b", "c", "c", "d")


class Connection:
    def __init__(self, network: str) -> None:
        self.network = network
        self.closed = False

    def close_idle(self) -> None:
        self.closed = True


steps = st.lists(
    st.tuples(st.sampled_from(["open", "open", "close", "rest", "wake"]), st.integers(0, 5), st.integers(0, 200)),
    max_size=150,
)


@given(steps)
def test_no_address_has_more_than_its_share_and_only_idle_ones_are_closed(steps: list[Any]) -> None:
    shares: ConnectionShares[Connection] = ConnectionShares(MOST, SHARE)
    members: dict[Connection, Place] = {}
    idle: list[Connection] = []
    for what, address, which in steps:
        if what == "open":
            made = Connection(NETWORKS[address])
            before = list(idle)
            place = shares.open(made, ADDRESSES[address])
            closed = [one for one in before if one.closed]
            assert closed in ([], [next((one for one in before if one.closed), None)])
            for one in closed:
                idle.remove(one)
                del members[one]
            full = Counter(one.network for one, place in members.items() if place is Place.FULL)
            probes = Counter(one.network for one, place in members.items() if place is Place.PROBES)
            if place is Place.FULL:
                assert full.total() < MOST and full[made.network] < SHARE
            else:
                assert full.total() == MOST or full[made.network] == SHARE
                assert not any(one.network == made.network for one in idle)
                has_room = probes.total() < RESERVE and probes[made.network] < RESERVE_SHARE
                assert (place is Place.PROBES) == has_room
            if place is not Place.NONE:
                members[made] = place
        elif members:
            one = list(members)[which % len(members)]
            if what == "close":
                shares.close(one)
                del members[one]
                idle = [other for other in idle if other is not one]
            elif what == "wake":
                shares.wake(one)
                idle = [other for other in idle if other is not one]
            elif members[one] is Place.FULL and one not in idle:
                shares.rest(one)
                idle.append(one)
    assert not any(one.closed for one in members)


class Looked(Connection):
    """Counts how often it is looked up."""

    times = 0

    def __hash__(self) -> int:
        Looked.times += 1
        return id(self)


def test_room_for_a_new_connection_is_found_without_a_search_through_the_idle_ones() -> None:
    shares: ConnectionShares[Connection] = ConnectionShares(4_000, 2_000)
    for address in ["10.0.0.1"] * 2_000 + ["10.0.0.2"] * 2_000:
        shares.open(made := Looked(address), address)
        shares.rest(made)
    Looked.times = 0
    last = Looked("b")
    assert shares.open(last, "10.0.0.2") is Place.FULL
    assert Looked.times < 50
