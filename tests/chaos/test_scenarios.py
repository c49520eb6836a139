"""The short form: the most important faults, one after the other on one running fleet. `make chaos` has all of them."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.report import Outcome
from tests.chaos.runner import SCRUB_ARGUMENTS, run_scenario

pytestmark = pytest.mark.anyio

SHORT = (
    "feed_cut_and_filled_from_replay",
    "engine_killed_and_restarted",
    "engine_restarted_while_the_sidecar_was_down",
    "sidecar_killed_and_restarted",
    "indexer_killed",
    "indexer_paused_past_its_lease",
    "redis_killed_and_restarted_with_its_data",
    "redis_flushed",
    "one_shard_wiped",
    "blocks_damaged_by_hand",
    "nats_killed_and_restarted",
    "nats_away_longer_than_the_outbox_holds",
    "stream_purged",
    "consumers_deleted",
    "poison_in_the_stream",
    "rogue_publisher_attacks",
    "engine_asleep_behind_a_living_sidecar",
)


INDEXER_ARGUMENTS = ("--retire-after-s", "30", *SCRUB_ARGUMENTS)
"""None of these scenarios is about retiring, and a sidecar may take long to start on a busy machine."""


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("chaos")
    async with running_fleet(
        folder, engines=2, hybrids=1, indexers=2, seed=1, indexer_arguments=INDEXER_ARGUMENTS
    ) as running:
        yield running


@pytest.mark.parametrize("name", SHORT)
async def test_the_index_is_exact_after(name: str, fleet: Fleet, report_outcome: Callable[[Outcome], None]) -> None:
    report_outcome(await run_scenario(fleet, name))
