"""The usage of each API's answer."""

from typing import Any

import pytest

from router_client.learning.token_counts import Usage


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 2}}, Usage(9, 2)),
        (
            {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}},
            Usage(9, 2, 8),
        ),
        ({"usage": {"input_tokens": 9, "output_tokens": 2}}, Usage(9, 2)),
        (
            {"usage": {"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 8}},
            Usage(9, 2, 8),
        ),
        (
            {"usage": {"input_tokens": 1, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3}},
            Usage(9, 0, 5),
        ),
        ({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}}, Usage(9, 0)),
        (
            {
                "response": {
                    "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 2}
                }
            },
            Usage(9, 2, 8),
        ),
        ({"meta_info": {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 8}}, Usage(9, 2, 8)),
        ({"type": "message_delta", "usage": {"output_tokens": 2}}, None),
        ({"usage": None}, None),
        ({"usage": 5, "message": "no"}, None),
        ([], None),
    ],
)
def test_a_usage_is_read_in_every_form(answer: Any, usage: Usage | None) -> None:
    assert Usage.of(answer) == usage
