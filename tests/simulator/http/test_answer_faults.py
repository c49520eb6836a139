"""Faulty answers, and comments while a stream waits."""

import httpx
import pytest

from tests.simulator.answer_faults import AnswerFaults
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

ASK = {"prompt": list(range(300, 310)), "max_tokens": 2}


@pytest.mark.parametrize(("fault", "events"), [("error", 2), ("late_error", 3)])
async def test_an_error_is_an_event_of_a_stream_and_a_body_of_json(fault: str, events: int) -> None:
    async with running_engine(AnswerFaults(fault)) as (_, client):
        stream = await client.post("/v1/completions", json={**ASK, "stream": True})
        assert stream.status_code == 200 and stream.text.count("data: ") == events and '"error"' in stream.text
        assert ("choices" in stream.text) == (fault == "late_error") and stream.text.endswith("data: [DONE]\n\n")
        whole = await client.post("/v1/completions", json=ASK)
        assert whole.status_code == 200 and whole.json()["error"]["code"] == 500


async def test_a_cut_answer_does_not_end() -> None:
    async with running_engine(AnswerFaults("cut")) as (_, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json={**ASK, "stream": True})


async def test_a_part_of_the_answer_comes_before_its_fault() -> None:
    async with running_engine(AnswerFaults("late_error", 3)) as (_, client):
        stream = await client.post("/v1/completions", json={**ASK, "max_tokens": 9, "stream": True})
        assert stream.text.count('"text"') == 3 and '"error"' in stream.text
    async with running_engine(AnswerFaults("hang", 2)) as (_, client):
        body = {**ASK, "max_tokens": 9, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(3)][2].startswith("data: {")
            metrics = [(await client.get("/metrics")).text for _ in range(2)]
            assert metrics[0] == metrics[1]


async def test_only_a_share_of_the_answers_is_faulty() -> None:
    async with running_engine(AnswerFaults("error", share=0.5)) as (_, client):
        answers = [(await client.post("/v1/completions", json=ASK)).json() for _ in range(40)]
        assert 0 < sum("error" in answer for answer in answers) < 40


async def test_a_stream_that_waits_sends_comments() -> None:
    async with running_engine(sse_keep_alive_interval=0.05, speed_up=1, prefill_us_per_token=30_000) as (_, client):
        stream = await client.post("/v1/completions", json={**ASK, "stream": True})
        assert stream.text.startswith(": keep-alive\n\n") and stream.text.endswith("data: [DONE]\n\n")
        assert stream.text.count('"choices"') == 2
