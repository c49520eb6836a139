"""A publisher's answers to requests, on both of its subjects."""

from collections.abc import Callable

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.bus.control import ControlOp, ControlRequest, ScopeFields
from kvatlas.bus.hash_requests import EngineHashesReply, EngineHashesRequest
from kvatlas.bus.subjects import control_subject, hashes_subject
from kvatlas.fleet.records import KvConnector
from kvatlas_publishers.engine_events import EngineStored
from kvatlas_publishers.publisher import Publisher
from tests.eventually import until
from tests.publishers.published_stream import SCOPE, SETTINGS, flushed, tokens

pytestmark = pytest.mark.anyio

KVCR = SETTINGS.model_copy(update={"kv_connector": KvConnector.KVCR})
ASKED = EngineHashesRequest(**ScopeFields.fields_of(SCOPE), sequence_hashes=unpack_hashes(extend_chain(tokens(64), 16)))


@pytest.mark.parametrize(
    ("subject", "valid"),
    [(control_subject, ControlRequest(op=ControlOp.STATUS)), (hashes_subject, ASKED)],
    ids=["control", "hashes"],
)
async def test_a_request_whose_answer_would_go_to_another_subject_is_counted_and_not_answered(
    nats_client: Client, subject: Callable[[str], str], valid: ControlRequest | EngineHashesRequest
) -> None:
    heard: list[Msg] = []

    async def hear(msg: Msg) -> None:
        heard.append(msg)

    await nats_client.subscribe("elsewhere", cb=hear)
    async with Publisher(KVCR, nats=nats_client) as publisher:
        await nats_client.publish(subject("w"), valid.pack(), reply="elsewhere")
        await nats_client.publish(subject("w"), b"\xc1")
        await until(lambda: publisher.counters.control_bad == 2, what="both are refused")
        await nats_client.request(subject("w"), valid.pack(), timeout=60)
        assert publisher.counters.control_bad == 2 and not heard


async def test_an_engines_own_hashes_are_answered(nats_client: Client) -> None:
    async with Publisher(KVCR, nats=nats_client) as publisher:
        await publisher.stored(EngineStored([7, 8, 9], None, tokens(48), 16))
        await flushed(publisher)
        answer = await nats_client.request(hashes_subject("w"), ASKED.pack(), timeout=60)
        assert EngineHashesReply.unpack(answer.data) == EngineHashesReply(worker_id="w", hashes=[7, 8, 9])
