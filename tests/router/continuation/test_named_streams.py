"""Messages and responses, whose events have names: whatever happens to their engines, clients get what a single one would have
sent."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.continuation.cuts import Rest
from kvatlas_router.continuation.events import named_event
from kvatlas_router.continuation.reasons import CannotContinue
from kvatlas_router.continuation.seam import Seam
from kvatlas_router.tokens.text_request import Api, TextRequest
from tests.router.continuation.exact_engine import END, MARKERS, PROMPT, START, ExactEngine

BODIES: dict[Api, dict[str, Any]] = {
    Api.MESSAGES: {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 30},
    Api.RESPONSES: {"input": "Say", "max_output_tokens": 30},
}
WORDS = st.lists(st.sampled_from(["a", " b", "c\n", "\n\n", '"', "\\", "ü", "🙂"]), min_size=1, max_size=6)


def run(text: TextRequest, tokens: Sequence[str], deaths: Sequence[int]) -> list[dict[str, Any]]:
    """What a client gets from engines with this answer, all but the last of which die after the given numbers of events."""
    seam, got = Seam(text), b""
    events = list(first_events(text.api, tokens))
    first = next(at for at, event in enumerate(events) if b"delta" in event) + 1
    for death in [*deaths, -1]:
        kept = events if death < 0 else events[: first + death % (len(events) - first)]
        for event in kept:
            got += seam.feed(event)
        if seam.ended:
            break
        if (end := seam.missing_end) is not None:
            got += end
            break
        rest, ids = whole_rest(seam, tokens)
        body = (
            seam.builder.body_of_ids(PROMPT, ids, len(ids), rest) if rest.by_ids else seam.builder.body(rest, len(ids))
        )
        seam.resume(rest, len(ids))
        events, first = rest_events(tokens, ids, body), 0
    return [json.loads(line[6:]) for line in got.decode().splitlines() if line.startswith("data: ")]


def whole_rest(seam: Seam, tokens: Sequence[str]) -> tuple[Rest, list[int]]:
    """The requested rest, and the ids of the answer so far, read from its text."""
    rest = seam.rest()
    raw = (
        MARKERS.raw(seam.builder.text_of(rest), opened=False)
        if rest.reasoned and rest.parts
        else seam.builder.text_of(rest)
    )
    ids = ExactEngine(tokens).ids[: next(at for at in range(len(tokens)) if "".join(tokens[:at]) == raw)]
    if rest.reasoned:
        marked = seam.builder.with_markers(rest, MARKERS, PROMPT, ids)
        assert marked is not None and seam.builder.trusts(rest, len(ids))
        rest = marked
    return rest, ids


def rest_events(tokens: Sequence[str], ids: Sequence[int], body: dict[str, Any]) -> list[bytes]:
    """A completion's or a chat's events after these ids."""
    asked = {
        "prompt": [*PROMPT, *ids],
        "max_tokens": body["max_tokens"],
        "return_token_ids": True,
        "stream_options": {},
    }
    raw = ExactEngine(tokens).stream({**asked, "stream_options": {"include_usage": True}})
    return [event.replace(b'"finish_reason":"length"', b'"finish_reason":"stop"') for event in raw]


def first_events(api: Api, tokens: Sequence[str]) -> Iterator[bytes]:
    """The events of vLLM's messages and responses, one token each."""
    parts: list[tuple[str, list[str]]] = []
    kind = "text"
    for token in tokens:
        if token in (START, END):
            kind = "thinking" if token == START else "text"
            continue
        if not token:
            continue  # the answer's end
        if not parts or parts[-1][0] != kind:
            parts.append((kind, []))
        parts[-1][1].append(token)
    usage = {"input_tokens": len(PROMPT), "output_tokens": len(tokens)}
    return message(parts, usage) if api is Api.MESSAGES else response(parts, usage, len(parts[0][1]))


def message(parts: list[tuple[str, list[str]]], usage: dict[str, Any]) -> Iterator[bytes]:
    yield named_event({"type": "message_start", "message": {"id": "m", "usage": {**usage, "output_tokens": 0}}})
    for index, (kind, texts) in enumerate(parts):
        block = {"type": kind, kind: ""}
        yield named_event({"type": "content_block_start", "index": index, "content_block": block})
        for text in texts:
            delta = {"type": f"{kind}_delta", kind: text}
            yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    yield named_event({"type": "message_delta", "delta": end, "usage": usage})
    yield named_event({"type": "message_stop"})


def response(parts: list[tuple[str, list[str]]], usage: dict[str, Any], thought: int) -> Iterator[bytes]:
    numbers = iter(range(10_000))

    def event(kind: str, **fields: Any) -> bytes:
        return named_event(
            dict(sorted({**fields, "type": f"response.{kind}", "sequence_number": next(numbers)}.items()))
        )

    whole: dict[str, Any] = {
        "id": "resp_1",
        "incomplete_details": None,
        "status": "in_progress",
        "output": [],
        "usage": None,
    }
    yield event("created", response=whole)
    items: list[dict[str, Any]] = []
    for index, (kind, texts) in enumerate(parts):
        is_text, text = kind == "text", "".join(texts)
        name, id = ("output_text", "msg_1") if is_text else ("reasoning_text", "rs_1")
        bare: dict[str, Any] = {"role": "assistant", "content": []} if is_text else {"summary": []}
        item = {"id": id, **bare, "status": "in_progress", "type": "message" if is_text else "reasoning"}
        more: dict[str, Any] = {"annotations": [], "text": text, "type": name, "logprobs": None}
        part = more if is_text else {"text": text, "type": name}
        place = {"item_id": id, "output_index": index, "content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if is_text else {}
        yield event("output_item.added", item=item, output_index=index)
        yield event("content_part.added", **place, part={**part, "text": ""})
        for one in texts:
            yield event(f"{name}.delta", **place, delta=one, **logprobs)
        yield event(f"{name}.done", **place, text=text, **logprobs)
        yield event("content_part.done", **place, part=part)
        items.append({**item, "content": [part], "status": "completed"})
        yield event("output_item.done", item=items[-1], output_index=index)
    counted = {
        "input_tokens": usage["input_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought if len(parts) > 1 else 0},
        "total_tokens": sum(usage.values()),
    }
    yield event("completed", response={**whole, "status": "completed", "output": items, "usage": counted})


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.created", "response": {}, "sequence_number": 0},
        {"type": "response.output_text.delta", "delta": "a", "sequence_number": 0},
        {"type": "response.unknown", "sequence_number": 7},
    ],
)
def test_responses_in_another_form_do_not_go_on(event: dict[str, Any]) -> None:
    seam = Seam(TextRequest.of(Api.RESPONSES, {"stream": True, "temperature": 0, **BODIES[Api.RESPONSES]}))
    assert seam.feed(named_event(event)) == named_event(event)
    with pytest.raises(CannotContinue, match="unreadable"):
        seam.rest()


@pytest.mark.parametrize("api", BODIES)
@given(thought=WORDS, words=WORDS, reasons=st.booleans(), deaths=st.lists(st.integers(0, 60), max_size=3))
def test_named_events_are_the_same(
    api: Api, thought: list[str], words: list[str], reasons: bool, deaths: list[int]
) -> None:
    """Wherever the engine dies: before and after the end of the reasoning, within the events that end an item, and before the
    last one."""
    text = TextRequest.of(api, {"model": "m", "stream": True, "temperature": 0, **BODIES[api]})
    tokens = [*([START, "\n", *thought, END] if reasons else []), "w", *words, ".", ""]
    assert run(text, tokens, deaths) == run(text, tokens, [])
