"""`kvatlas up --engine`: the settings of the publishers of engines that are discovered."""

from pathlib import Path

import pytest

from kvatlas_cli.commands.up import discover_sidecars
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("events", "given", "block_size"), [(True, {}, None), (True, {"block_size": "16"}, 16), (False, {}, 8)]
)
async def test_the_block_size_is_learned_from_events_if_there_are_any(
    events: bool, given: dict[str, str], block_size: int | None, tmp_path: Path
) -> None:
    """The engine's flag is another number with context parallelism."""
    async with running_engine(block_size=8, events=events) as (addresses, _):
        flags = {"engine_url": addresses.base_url, "worker_id": "w", **given}
        [settings] = await discover_sidecars(flags, {}, tmp_path)
    assert (settings.block_size, settings.events, settings.model_id) == (block_size, events, "mock-model")
