"""The order of a stream, for every way in which a gateway may send a request and its answer, without a server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.gateway.ext_proc.ext_proc_pb2 import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    SEND,
    STREAMED,
    BodySendMode,
    ProcessingRequest,
    ProcessingResponse,
)
from kvatlas_router.gateway.ext_proc.messages import MOST_PIECE_BYTES
from kvatlas_router.gateway.ext_proc.stream_state import (
    AnswerHead,
    AnswerPart,
    AskDestination,
    OutOfOrder,
    ResponseMode,
    StreamState,
)
from kvatlas_router.gateway.picker import Destination
from tests.router.gateway.messages import (
    POST,
    answer_body,
    answer_headers,
    answer_trailers,
    kinds,
    request_body,
    request_headers,
    request_trailers,
    set_headers,
)

TO = Destination(("10.0.0.1:8000", "10.0.0.2:8000"), {"x-rank": "3"})

Bodies = st.lists(st.binary(max_size=9).map(lambda part: part * 20_000), max_size=4)


def new_state(response_mode: ResponseMode = ResponseMode.WHOLE, *, wants_body: bool = True) -> StreamState:
    return StreamState(lambda _: wants_body, response_mode, most_body_bytes=300_000)


@dataclass
class Passed:
    """What a stream sent back and asked."""

    replies: list[ProcessingResponse] = field(default_factory=list)
    asked: list[AskDestination] = field(default_factory=list)
    heads: list[AnswerHead] = field(default_factory=list)

    def run(self, state: StreamState, messages: Sequence[ProcessingRequest], destination: Destination = TO) -> "Passed":
        for message in messages:
            match state.receive(message):
                case AskDestination() as ask:
                    self.asked.append(ask)
                    replies: Iterator[ProcessingResponse] = state.forward(destination)
                case AnswerHead() as head:
                    self.heads.append(head)
                    replies = iter((state.pass_head({"x-added": "1"}),))
                case AnswerPart() as part:
                    replies = state.pass_part(part, part.body)
                case other:
                    replies = other
            self.replies += replies
        return self

    def of(self, kind: str) -> list[ProcessingResponse]:
        return [reply for reply in self.replies if reply.WhichOneof("response") == kind]


def cut(parts: Sequence[bytes], *, trailers: bool, over_apart: bool) -> list[tuple[bytes, bool]]:
    """A body's pieces; its end is in the last one, in a separate empty one, or shown by trailers."""
    pieces = [(part, False) for part in parts]
    if trailers:
        return pieces
    if over_apart or not pieces:
        return [*pieces, (b"", True)]
    return [*pieces[:-1], (pieces[-1][0], True)]


@given(Bodies, Bodies, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_in_full_duplex_everything_comes_back_in_order_in_small_pieces_behind_the_decision(
    asked: list[bytes],
    answered: list[bytes],
    trailers: bool,
    over_apart: bool,
    wants_body: bool,
    answer_has_trailers: bool,
) -> None:
    request = [
        request_body(*piece[:1], over=piece[1]) for piece in cut(asked, trailers=trailers, over_apart=over_apart)
    ]
    answer = cut(answered, trailers=answer_has_trailers, over_apart=over_apart)
    messages = [
        request_headers(),
        *request,
        *([request_trailers()] if trailers else []),
        answer_headers("200", {"content-type": "text/plain"}),
        *(answer_body(body, over=over) for body, over in answer),
        *([answer_trailers()] if answer_has_trailers else []),
    ]
    state = new_state(wants_body=wants_body)
    passed = Passed().run(state, messages)

    body = b"".join(asked)
    (ask,) = passed.asked
    assert ask.body == (body if wants_body and len(body) <= 300_000 else None)
    assert state.request_over and state.answer_over
    pieces = [reply.request_body.response.body_mutation.streamed_response for reply in passed.of("request_body")]
    assert b"".join(piece.body for piece in pieces) == body
    assert all(len(piece.body) <= MOST_PIECE_BYTES for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [not trailers] * bool(pieces)
    back = [reply.response_body.response.body_mutation.streamed_response for reply in passed.of("response_body")]
    assert b"".join(piece.body for piece in back) == b"".join(answered)
    assert all(len(piece.body) <= MOST_PIECE_BYTES for piece in back)
    assert [piece.end_of_stream for piece in back] == [False] * (len(back) - 1) + [not answer_has_trailers] * bool(back)
    order = [
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    ]
    found = [order.index(kind) for kind in kinds(passed.replies)]
    assert found == sorted(found)
    for kind, expected in zip(order, (1, None, trailers, 1, None, answer_has_trailers), strict=True):
        assert expected is None or len(passed.of(kind)) == expected


@given(Bodies, Bodies, st.booleans(), st.sampled_from([BUFFERED, STREAMED]))
def test_in_other_modes_each_message_gets_one_reply(
    asked: list[bytes], answered: list[bytes], wants_body: bool, mode: BodySendMode
) -> None:
    request = cut(asked, trailers=False, over_apart=True)
    if mode == BUFFERED:
        request = [(b"".join(asked), True)]
    answer = cut(answered, trailers=True, over_apart=True)
    messages = [
        request_headers(request_mode=mode, answer_mode=mode),
        *(request_body(body, over=over) for body, over in request),
        answer_headers(),
        *(answer_body(body, over=over) for body, over in answer),
        answer_trailers(),
    ]
    state = new_state(wants_body=wants_body)
    passed = Passed().run(state, messages)
    assert len(passed.replies) == len(messages) and len(passed.asked) == 1
    assert not any(
        reply.request_body.response.HasField("body_mutation") or reply.response_body.response.HasField("body_mutation")
        for reply in passed.replies
    )
    told = [reply for reply in passed.replies if reply.HasField("dynamic_metadata")]
    reads = wants_body and mode == BUFFERED
    assert kinds(told) == ["request_body" if reads else "request_headers"]
    assert state.request_over and state.answer_over


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED])
def test_the_destination_is_told_as_a_header_and_as_metadata(mode: BodySendMode) -> None:
    passed = Passed().run(new_state(), [request_headers(request_mode=mode), request_body(b"{}", over=True)])
    told = next(reply for reply in passed.replies if reply.HasField("dynamic_metadata"))
    both = "10.0.0.1:8000,10.0.0.2:8000"
    assert set_headers(told) == {"x-gateway-destination-endpoint": both, "x-rank": "3"}
    assert told.dynamic_metadata == {"envoy.lb": {"x-gateway-destination-endpoint": both}}
    part = told.request_headers if mode == FULL_DUPLEX_STREAMED else told.request_body
    assert part.response.clear_route_cache


def test_a_request_without_a_body_is_decided_at_once() -> None:
    for mode in (FULL_DUPLEX_STREAMED, BUFFERED, NONE):
        state = new_state()
        passed = Passed().run(state, [request_headers({":method": "GET", ":path": "/"}, over=True, request_mode=mode)])
        assert kinds(passed.replies) == ["request_headers"] and passed.asked[0].body == b"" and state.request_over


def test_a_gateway_that_sends_no_bodies_gets_its_decision_from_the_headers() -> None:
    state = new_state()
    passed = Passed().run(state, [request_headers(request_mode=NONE, answer_mode=NONE), answer_headers()])
    assert kinds(passed.replies) == ["request_headers", "response_headers"]
    assert passed.asked[0].body is None and state.request_over and not state.answer_over


def test_a_body_that_is_too_long_is_to_be_refused() -> None:
    state = new_state()
    assert not Passed().run(state, [request_headers(), request_body(b"a" * 200_000)]).asked
    ask = state.receive(request_body(b"b" * 200_000))
    assert isinstance(ask, AskDestination) and ask.too_long and ask.body is None and not state.request_over


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED])
@pytest.mark.parametrize("has_length", [True, False])
def test_a_changed_body_has_its_new_length(mode: BodySendMode, has_length: bool) -> None:
    headers = {**POST, "content-length": "2"} if has_length else POST
    messages = [request_headers(headers, request_mode=mode), request_body(b"{}", over=True)]
    passed = Passed().run(new_state(), messages, Destination(("10.0.0.1:80",), {}, b'{"a": 1}'))
    told = next(reply for reply in passed.replies if reply.HasField("dynamic_metadata"))
    assert set_headers(told).get("content-length") == ("8" if has_length else None)
    mutation = passed.replies[-1].request_body.response.body_mutation
    assert (mutation.body or mutation.streamed_response.body) == b'{"a": 1}'


def test_parts_of_an_answer_can_be_left_out_in_full_duplex() -> None:
    state = new_state()
    passed = Passed().run(state, [request_headers(over=True), answer_headers()])
    part = state.receive(answer_body(b"hidden"))
    assert isinstance(part, AnswerPart) and not list(state.pass_part(part, b""))
    last = state.receive(answer_body(b"also", over=True))
    assert isinstance(last, AnswerPart) and state.can_change_answer
    (end,) = state.pass_part(last, b"")
    assert end.response_body.response.body_mutation.streamed_response.end_of_stream
    assert passed.heads[0].status == 200 and state.answer_over


def test_a_gateway_that_answers_by_itself_before_the_decision_is_let_alone() -> None:
    state = new_state()
    passed = Passed().run(state, [request_headers(), request_body(b"half"), answer_headers("408", over=True)])
    assert kinds(passed.replies) == ["response_headers"] and not passed.asked
    assert passed.heads[0].status == 408 and state.answer_over and not state.request_over


def test_an_answer_may_come_while_the_request_still_goes_on() -> None:
    state = new_state(wants_body=False)
    messages = [
        request_headers(),
        request_body(b"1"),
        answer_headers("413"),
        request_body(b"2"),
        answer_body(b"no", over=True),
    ]
    passed = Passed().run(state, messages)
    assert kinds(passed.replies) == [
        "request_headers",
        "request_body",
        "response_headers",
        "request_body",
        "response_body",
    ]


@pytest.mark.parametrize(
    ("response_mode", "answer_mode", "asks"),
    [
        (ResponseMode.HEADERS, BUFFERED, True),
        (ResponseMode.HEADERS, FULL_DUPLEX_STREAMED, True),
        (ResponseMode.HEADERS, NONE, False),
        (ResponseMode.WHOLE, BUFFERED, False),
        (ResponseMode.NONE, BUFFERED, False),
    ],
)
def test_headers_only_are_asked_for_where_that_changes_something(
    response_mode: ResponseMode, answer_mode: BodySendMode, asks: bool
) -> None:
    for request_mode in (BUFFERED, FULL_DUPLEX_STREAMED):
        messages = [request_headers(request_mode=request_mode, answer_mode=answer_mode), request_body(b"{}", over=True)]
        first = Passed().run(new_state(response_mode), messages).replies[0]
        assert first.HasField("mode_override") is asks
        if asks:
            override = first.mode_override
            assert (override.request_body_mode, override.response_body_mode) == (request_mode, NONE)
            assert (override.response_header_mode, override.response_trailer_mode) == (SEND, SEND)


@pytest.mark.parametrize(
    "messages",
    [
        [request_body(b"first")],
        [request_trailers()],
        [answer_body(b"first")],
        [answer_trailers()],
        [request_headers(), request_headers()],
        [request_headers(), request_body(b"", over=True), request_body(b"more")],
        [request_headers(), request_trailers(), request_trailers()],
        [request_headers(over=True), request_trailers()],
        [request_headers(over=True), answer_headers(), answer_headers()],
        [request_headers(over=True), answer_headers(over=True), answer_body(b"more")],
        [request_headers(over=True), answer_headers(over=True), answer_trailers()],
    ],
    ids=lambda messages: "-".join(kind.WhichOneof("request") for kind in messages),
)
def test_messages_out_of_order_are_refused(messages: list[ProcessingRequest]) -> None:
    with pytest.raises(OutOfOrder):
        Passed().run(new_state(), messages)


def test_messages_of_a_newer_kind_are_passed_over() -> None:
    assert not Passed().run(new_state(), [ProcessingRequest()]).replies
