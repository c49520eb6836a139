"""The body of a completion or a chat, as far as a router reads it."""

from typing import Any

import pytest

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens import Api, TextRequest


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"prompt": ""}', b'{"prompt": 5}', b'{"prompt": [{}]}', b'{"prompt": []}', b"\xff"]
)
def test_a_body_without_a_prompt_is_refused_in_one_line(body: bytes) -> None:
    with pytest.raises(InvalidValue) as error:
        TextRequest.parse(Api.COMPLETIONS, body)
    assert "\n" not in str(error.value)


def test_a_router_reads_prompts_tokens_and_options_from_a_body() -> None:
    several = TextRequest.parse(Api.COMPLETIONS, b'{"prompt": [[1, 2], [3]], "max_tokens": 9, "model": "m"}')
    assert (several.prompts, several.token_ids, several.output_tokens, several.model) == (2, [1, 2], 9, "m")
    chat = TextRequest.parse(
        Api.CHAT, b'{"messages": [{"content": "abc"}], "stream": true, "stream_options": {"include_usage": true}}'
    )
    assert (chat.prompts, chat.streamed, chat.wants_usage, chat.letters, chat.token_ids) == (1, True, True, 3, None)


@pytest.mark.parametrize(
    ("api", "fields", "vllm", "sglang"),
    [
        (Api.CHAT, {}, None, None),
        (Api.CHAT, {"prompt_logprobs": 0}, 0, None),
        (Api.CHAT, {"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, None, None),
        (Api.CHAT, {"skip_reading_prefix_cache": True}, 0, None),
        (Api.CHAT, {"logprobs": True}, None, None),
        (Api.COMPLETIONS, {"echo": True}, None, None),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 0}, 0, 0),
        (Api.COMPLETIONS, {"return_logprob": True, "logprob_start_len": 40}, None, 40),
        (Api.COMPLETIONS, {"return_logprob": True, "logprob_start_len": -1}, None, None),
        (Api.COMPLETIONS, {"logprob_start_len": 40}, None, None),
        (
            Api.COMPLETIONS,
            {"skip_reading_prefix_cache": "yes", "logprob_start_len": "x", "return_logprob": True},
            None,
            None,
        ),
    ],
)
def test_a_request_says_how_much_of_the_cache_it_lets_its_engine_read(
    api: Api, fields: dict[str, Any], vllm: int | None, sglang: int | None
) -> None:
    reading = TextRequest(api, {"prompt": "a", "messages": [{}], **fields}).cache_reading
    assert reading.readable_tokens(EngineKind.VLLM) == vllm
    assert reading.readable_tokens(EngineKind.SGLANG) == sglang
