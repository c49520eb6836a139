import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.bus.pull_protocol import (
    Delivery,
    PullStatus,
    PullWindow,
    last_consumer_seq,
    messages_returned,
    parse_delivery,
    pull_status,
)


def status(code: str, description: str = "", **headers: str) -> Msg:
    return Msg(Client(), "_INBOX.x", "", b"", {"Status": code, "Description": description, **headers})


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.KVATLAS_EVENTS.kva-1.1.420.17.1700000000000000000.5",
        "$JS.ACK.hub.ACCOUNT.KVATLAS_EVENTS.kva-1.1.420.17.1700000000000000000.5",
        "$JS.ACK._.ACCOUNT.KVATLAS_EVENTS.kva-1.1.420.17.1700000000000000000.5.random",
    ],
)
def test_the_reply_subject_holds_the_delivery(reply: str) -> None:
    assert parse_delivery(reply) == Delivery(420, 17, 5)


@pytest.mark.parametrize("reply", ["", "_INBOX.a.b", "$JS.API.A.B.C.D.E.F.G", "$JS.ACK.short"])
def test_another_reply_subject_is_an_error(reply: str) -> None:
    with pytest.raises(ValueError, match=r"expected \$JS\.ACK"):
        parse_delivery(reply)


def test_two_requests_are_kept_outstanding() -> None:
    window = PullWindow(100)
    sent = 0
    while window.is_due():
        window.add_request()
        sent += 1
    assert sent == 2
    window.outstanding -= 99
    assert not window.is_due()
    window.outstanding -= 1
    assert window.is_due()


def test_messages_of_an_ended_request_are_requested_again() -> None:
    window = PullWindow(100)
    window.add_request()
    window.add_request()
    window.end_request(100)
    assert window.is_due()
    window.end_request(1_000)
    assert window.outstanding == 0


@pytest.mark.parametrize(
    ("code", "description", "meaning"),
    [
        ("100", "Idle Heartbeat", PullStatus.IDLE),
        ("404", "No Messages", PullStatus.ENDED),
        ("408", "Request Timeout", PullStatus.ENDED),
        ("409", "Message Size Exceeds MaxBytes", PullStatus.ENDED),
        ("409", "Batch Completed", PullStatus.ENDED),
        ("409", "Consumer Deleted", PullStatus.BROKEN),
        ("409", "Leadership Change", PullStatus.BROKEN),
        ("409", "Server Shutdown", PullStatus.BROKEN),
        ("503", "", PullStatus.BROKEN),
    ],
)
def test_each_status_has_its_meaning(code: str, description: str, meaning: PullStatus) -> None:
    assert pull_status(status(code, description)) is meaning


def test_a_message_of_the_stream_is_not_a_status_even_with_headers() -> None:
    msg = Msg(Client(), "kvatlas.events.1.w", "$JS.ACK.S.C.1.2.3.4.5", b"", {"Status": "409"})
    assert pull_status(msg) is None


def test_the_numbers_in_a_status() -> None:
    assert messages_returned(status("408", **{"Nats-Pending-Messages": "12"})) == 12
    assert messages_returned(status("408")) == 0
    assert last_consumer_seq(status("100", **{"Nats-Last-Consumer": "40"})) == 40
    assert last_consumer_seq(status("100")) is None
