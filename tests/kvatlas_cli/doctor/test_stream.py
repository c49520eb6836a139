"""Faults of NATS and the event stream: each is one finding that says what to do."""

from typing import Any

import pytest
from nats.js.api import DiscardPolicy, StreamConfig

from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.bus.subjects import STREAM
from kvatlas_cli.doctor import Level
from kvatlas_cli.doctor.stream import judge_stream
from tests.kvatlas_cli.doctor.installation import Installation

pytestmark = pytest.mark.anyio


async def test_a_missing_stream_is_found(installation: Installation) -> None:
    assert f"no stream {STREAM}" in (await installation.problem("nats.stream")).line
    await ensure_stream(installation.nats_client, StreamSettings(storage="memory"))
    assert [one.level for one in await installation.findings("nats.stream")] == [Level.OK]
    (limits,) = await installation.findings("nats.limits")
    assert limits.level is Level.OK and "30 min, 1,024 MiB, in memory, 1 replica" in limits.line


async def test_a_stream_with_unsuitable_settings_is_found(installation: Installation) -> None:
    config = StreamConfig(
        name=STREAM, subjects=["other.>"], discard=DiscardPolicy.NEW, max_msgs=10, max_msg_size=1_024, no_ack=True
    )
    await installation.nats_client.jetstream().add_stream(config)
    assert "other.>" in (await installation.problem("nats.subjects")).line
    lines = [one.line for one in await installation.findings("nats.limits")]
    assert all(one.level is Level.ERROR for one in await installation.findings("nats.limits"))
    for part in ("discards new", "accepts messages of up to 1,024 bytes", "max_msgs 10", "does not acknowledge"):
        assert sum(part in line for line in lines) == 1


async def test_a_stream_that_reaches_back_only_seconds_is_found(installation: Installation) -> None:
    await ensure_stream(installation.nats_client, StreamSettings(storage="memory", max_bytes=20_000))
    jetstream = installation.nats_client.jetstream()
    for _ in range(30):
        await jetstream.publish("kvatlas.events.0.w", bytes(1_000))
    short = await installation.problem("nats.stream")
    assert short.level is Level.WARNING and "reach back" in short.line and "max_bytes" in short.advice


def test_a_server_with_a_small_max_payload_is_found() -> None:
    config: dict[str, Any] = {"subjects": ["kvatlas.events.*.*"], "retention": "limits", "discard": "old"}
    found = list(judge_stream(config, {}, 65_536, 0))
    assert [one.level for one in found if one.check == "nats.payload"] == [Level.INFO]
