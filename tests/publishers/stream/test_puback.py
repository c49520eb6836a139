import pytest

from kvatlas_publishers.stream.puback import NegativeAck, Refusal, read_ack


@pytest.mark.parametrize(
    ("data", "position"),
    [
        (b'{"stream":"KVATLAS_EVENTS","seq":1}', 1),
        (b'{"stream":"KVATLAS_EVENTS", "seq":18446744073709551615}', (1 << 64) - 1),
        (b'{"stream":"S","domain":"hub","seq":42}', 42),
        (b'{"stream":"S","seq":42,"duplicate":true}', 42),
    ],
)
def test_an_ack_has_the_stream_position(data: bytes, position: int) -> None:
    assert read_ack(data, None) == position


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        ('{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}', Refusal.NO_SPACE),
        ('{"code":503,"err_code":10077,"description":"maximum messages exceeded"}', Refusal.NO_SPACE),
        ('{"code":500,"err_code":10047,"description":"insufficient storage resources available"}', Refusal.NO_SPACE),
        ('{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"}', Refusal.TOO_LARGE),
        ('{"code":404,"err_code":10059,"description":"stream not found"}', Refusal.NO_STREAM),
        ('{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}', Refusal.BUSY),
        ('{"code":500,"err_code":99999,"description":"something new"}', Refusal.OTHER),
    ],
)
def test_an_error_has_its_refusal(error: str, refusal: Refusal) -> None:
    answer = read_ack(b'{"error":' + error.encode() + b',"stream":"S","seq":0}', None)
    assert isinstance(answer, NegativeAck)
    assert answer.refusal is refusal
    assert answer.detail in error


def test_an_empty_answer_means_no_stream() -> None:
    answer = read_ack(b"", {"Status": "503"})
    assert isinstance(answer, NegativeAck)
    assert answer.refusal is Refusal.NO_STREAM


@pytest.mark.parametrize("data", [b"", b"+ACK", b"{}", b'{"seq":"x"}', b'{"error":null}', b"[1]", b'"seq"', b"\xff"])
def test_bytes_that_are_no_ack_are_a_refusal(data: bytes) -> None:
    answer = read_ack(data, None)
    assert isinstance(answer, NegativeAck)
    assert answer.refusal is Refusal.OTHER
