"""Edits of events change one member and no other byte."""

import json
from typing import Any

import pytest

from kvatlas_router.continuation import edits

TEXT = '{"usage":{"a":1}} "id":"x" "token_ids":[1]'
"""Generated text that looks like members: its quotes are escaped."""


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_usage_is_cut_or_changed_in_any_place(separators: tuple[str, str], place: str) -> None:
    usage: dict[str, Any] = {"usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}}
    rest: dict[str, Any] = {"id": "x", "choices": [{"text": TEXT, "usage_of": "usage"}]}
    whole = {**usage, **rest} if place == "first" else {**rest, **usage}
    whole = {**whole, "last": 1} if place == "middle" else whole
    raw = json.dumps(whole, separators=separators).encode()
    without = {name: value for name, value in whole.items() if name != "usage"}
    assert edits.without_usage(raw) == json.dumps(without, separators=separators).encode()
    changed = edits.with_usage(raw, lambda found: {**found, "prompt_tokens": 2})
    assert json.loads(changed) == {**whole, "usage": {**usage["usage"], "prompt_tokens": 2}}
    assert edits.without_usage(edits.without_usage(raw)) == edits.without_usage(raw)


def test_a_stream_keeps_its_identity_and_its_text() -> None:
    first = json.dumps({"id": "a-1", "created": 7, "model": "m", "choices": []}).encode()
    other = {"id": "b-2", "created": 9, "model": "n", "choices": [{"text": TEXT, "id": "b-2", "token_ids": [1, 2]}]}
    event = edits.with_identity(json.dumps(other).encode(), edits.identity_of(first))
    assert json.loads(event) == {**other, "id": "a-1", "created": 7, "model": "m"}
    assert json.loads(edits.without_token_ids(event))["choices"][0] == {"text": TEXT, "id": "b-2", "token_ids": None}
    assert json.loads(edits.with_text(event, 'ü"\\'))["choices"][0]["text"] == 'ü"\\'
