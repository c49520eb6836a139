"""The body of a completion or a chat, as far as a router reads it."""

import pytest

from kvatlas.errors import InvalidValue
from router_client.tokens import Api, TextRequest


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
