"""The pool's functions and Python use the same names and numbers for the same things."""

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.reservations import Outcome, pool_queue, queue_lines, waiting_request
from kvatlas.reservations.memory import CLOCK_SLACK_US
from kvatlas.reservations.protocol import ID_BYTES
from kvatlas.reservations.redis_calls import POOL_LIBRARY, pool_keys
from tests.kvatlas.lua_text import constants, words

POOL = constants(POOL_LIBRARY.source("_layout"))


def test_outcomes_of_reservations_have_the_same_names() -> None:
    assert words(POOL_LIBRARY.source("_layout"), "OUTCOME") == [outcome.value for outcome in Outcome]


def test_keys_are_in_the_same_order() -> None:
    names = [key.rpartition(":")[2].partition(".")[0] for key in pool_keys("p")]
    assert [POOL[name.upper()] for name in names] == list(range(1, len(names) + 1))


def test_sizes_and_times_are_the_same() -> None:
    assert (POOL["ID_BYTES"], POOL["HASH_BYTES"]) == (ID_BYTES, HASH_BYTES)
    assert POOL["CLOCK_SLACK_US"] == CLOCK_SLACK_US


def test_the_queue_has_the_same_bounds_and_units() -> None:
    found: dict[str, int] = {}
    for part in ("_queue", "_queue_turns", "_queue_charges"):
        found |= constants(POOL_LIBRARY.source(part))
    for module, names in (
        (pool_queue, ("LEASE_US", "PROGRAM_US", "FORGET_US", "MOST_COUNTERS", "MOST_CHARGES", "MOST_COUNTER")),
        (queue_lines, ("MOST_WINDOW", "MOST_LANES", "MOST_LINES", "MOST_AHEAD")),
        (waiting_request, ("UNCACHED_UNITS", "CACHED_UNITS", "OUTPUT_UNITS", "MOST_LANE_WORKERS")),
    ):
        assert {name: found[name] for name in names} == {name: getattr(module, name) for name in names}
