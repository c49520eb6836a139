from httptools import HttpRequestParser
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.http.chunked_body import ChunkedBody

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Events:
    ended = False

    def on_message_complete(self) -> None:
        self.ended = True


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Chunks that look like the ends of others, up to the line of the last one."""
    lines = st.builds(
        lambda zeros, extension, upper: (b"0" * zeros, extension, upper),
        st.integers(0, 3),
        st.sampled_from([b"", b";a", b";a=b", b';a="0"']),
        st.booleans(),
    )
    chunks = draw(st.lists(st.tuples(lines, st.text("0\r\n;a", min_size=1, max_size=40)), max_size=4))
    body = b""
    for (zeros, extension, upper), data in chunks:
        size = b"%X" % len(data) if upper else b"%x" % len(data)
        body += zeros + size + extension + b"\r\n" + data.encode() + b"\r\n"
    zeros, extension, _ = draw(lines)
    last: bytes = b"0" + zeros + extension + b"\r\n"
    return body + last


@given(bodies(), st.sampled_from([b"\r\n", b"a: b\r\n\r\n"]), st.integers(1, 60))
def test_trailers_begin_where_the_parser_sees_them(body: bytes, trailers: bytes, at_once: int) -> None:
    sent, chunks, found = body + trailers + b"GET /", ChunkedBody(), None
    for start in range(0, len(sent), at_once):
        trailers_at = chunks.find_trailers(bytearray(b"\n" + sent[start : start + at_once]), 1)
        if trailers_at is not None:
            found = start + trailers_at - 1
            break
    assert found == len(body)
    events = Events()
    parser = HttpRequestParser(events)
    parser.feed_data(HEAD + sent[:found])
    assert not events.ended
    parser.feed_data(trailers)
    assert events.ended
