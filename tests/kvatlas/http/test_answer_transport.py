"""The head of an answer leaves together with what follows at once."""

import asyncio
from collections.abc import Iterable

import pytest

from kvatlas.http.answer_transport import AnswerTransport

pytestmark = pytest.mark.anyio

HEAD, BODY, MORE = b"HTTP/1.1 200 OK\r\n\r\n", b"body", b"more"


class Sent(asyncio.Transport):
    """Keeps what is sent, one entry per system call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.calls.append(b"".join(list_of_data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def answer_on(sent: Sent) -> AnswerTransport:
    return AnswerTransport(sent, asyncio.get_running_loop())


async def test_the_head_leaves_with_the_body_that_follows_at_once() -> None:
    sent = Sent()
    answer = answer_on(sent)
    for part in (HEAD, BODY, MORE):
        answer.write(part)
    assert sent.calls == [HEAD + BODY, MORE]
    await asyncio.sleep(0)
    assert sent.calls == [HEAD + BODY, MORE]


async def test_a_head_does_not_wait_for_a_body_that_comes_later() -> None:
    sent = Sent()
    answer = answer_on(sent)
    answer.write(HEAD)
    await asyncio.sleep(0)
    assert sent.calls == [HEAD]
    answer.write(BODY)
    assert sent.calls == [HEAD, BODY]


async def test_a_head_leaves_before_its_connection_is_closed() -> None:
    sent = Sent()
    answer = answer_on(sent)
    answer.write(HEAD)
    answer.close()
    assert sent.calls == [HEAD] and answer.is_closing()


async def test_a_client_that_has_left_gets_nothing() -> None:
    sent = Sent()
    answer = answer_on(sent)
    answer.write(HEAD)
    sent.close()
    await asyncio.sleep(0)
    assert sent.calls == []
