"""`kvatlas up --engine`: the settings of publishers for discovered engines."""

from pathlib import Path

import pytest

from kvatlas.settings import UpSettings
from kvatlas_cli.discovered_sidecars import discover_sidecars
from tests.publishers.engines.engine_http import engine_http
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("events", "given", "block_size"), [(True, {}, None), (True, {"block_size": "16"}, 16), (False, {}, 8)]
)
async def test_the_block_size_is_learned_from_events_if_there_are_any(
    events: bool, given: dict[str, str], block_size: int | None, tmp_path: Path
) -> None:
    """With context parallelism, the engine's flag has a different number."""
    async with running_engine(block_size=8, events=events) as (addresses, _):
        flags = {"engine_url": addresses.base_url, "worker_id": "w", **given}
        [settings] = await discover_sidecars(flags, {}, tmp_path)
    assert (settings.block_size, settings.events, settings.model_id) == (block_size, events, "mock-model")


async def test_an_engine_behind_a_key_is_found_and_its_publisher_has_the_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-others\nw sk-one\n")
    up = UpSettings.load(engine_key_file=keys)
    with engine_http() as engine:
        engine.key = "sk-one"
        engine.pages = {"/v1/models": (200, '{"data": [{"id": "m"}]}')}
        flags = {"engine_url": engine.url, "worker_id": "w", "endpoint": "tcp://127.0.0.1:1"}
        [settings] = await discover_sidecars(flags, {"engine_key_file": keys}, tmp_path, up.engine_access)
    assert settings.model_id == "m" and settings.engine_access.key_of("w") == "sk-one"
