"""A wrong value from outside is described in one line."""

from typing import Any

import msgpack
import pytest

from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.records import WorkerState
from kvatlas.identity import Scope
from kvatlas.request import RequestHints
from kvatlas.settings import PublishSettings
from kvatlas.validation import MAX_NUMBER, MAX_OUTPUT_TOKENS
from router_client import Prompt


@pytest.mark.parametrize(
    ("hints", "line"),
    [
        ([], "the request is []; expected an object"),
        ({"request_id": ""}, "request field request_id is ''; expected non-empty text"),
        ({"request_id": "r", "token_ids": "a"}, "request field token_ids is 'a'; expected a list"),
        ({"request_id": "r", "block_tokens": 0}, "request field block_tokens is 0; expected at least 1"),
        ({"request_id": "r", "slo": {"ttft_ms": 0}}, "request field slo.ttft_ms is 0; expected more than 0"),
        (
            {"request_id": "r", "estimated_decode_tokens": 1 << 80},
            f"request field estimated_decode_tokens is {1 << 80}; expected at most {MAX_OUTPUT_TOKENS}",
        ),
    ],
)
def test_a_wrong_hint_is_described(hints: Any, line: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        RequestHints.parse(hints)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("payload", "line"),
    [
        (msgpack.packb({}), "WorkerState field id is missing"),
        (msgpack.packb([]), "WorkerState is []; expected an object"),
        (
            msgpack.packb({"id": "w", "sampled_us": 1 << 60}),
            f"WorkerState field sampled_us is {1 << 60}; expected at most",
        ),
        (b"\xc1", "not a WorkerState: 1 bytes that are not msgpack: FormatError"),
    ],
)
def test_a_wrong_record_is_described(payload: bytes, line: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        WorkerState.unpack(payload)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("output_tokens", [-1, MAX_OUTPUT_TOKENS + 1])
def test_a_prompt_with_unbounded_output_is_refused(output_tokens: int) -> None:
    with pytest.raises(InvalidValue, match=f"output_tokens is {output_tokens}; expected 0 to {MAX_OUTPUT_TOKENS}"):
        Prompt.of_tokens(Scope("m", "m"), [1], output_tokens=output_tokens)
    assert MAX_OUTPUT_TOKENS * 1_000 < MAX_NUMBER


@pytest.mark.parametrize("name", ["nats_url_file", "state_dir", "worker_id"])
def test_a_setting_with_a_nul_character_is_refused(name: str) -> None:
    flags = {"engine": "vllm", "worker_id": "w", "model_id": "m", "endpoint": "tcp://h:1", name: "a\0b"}
    with pytest.raises(SettingsError, match="expected text without a NUL character"):
        PublishSettings.load(**flags)
