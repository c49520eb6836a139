"""Where the chunks of a body end."""

import re

_CRLF = 2
_HEX = 16
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]+)[^\n]*\n")
_NO_DIGIT = re.compile(rb"[^0-9A-Fa-f]")


class ChunkedBody:
    """Follows a body's chunks (RFC 9112, 7.1), which may be cut anywhere, without looking into them. It checks nothing: the
    parser of HTTP reads the same data."""

    __slots__ = ("_cut_line", "_left")

    def __init__(self) -> None:
        self._left = 0
        """Bytes that are still to come of a chunk and of the line end after it."""
        self._cut_line = bytearray()
        """A line with a size, as far as it arrived."""

    def find_trailers(self, data: bytearray, start: int) -> int | None:
        """Follow data that has not been followed yet, from `start` on. Returns where the last chunk's line ends, after which
        come the trailers; None if it has not ended."""
        at = start + self._left
        self._left = 0
        while at < len(data):
            line = None if self._cut_line else _SIZE_LINE.match(data, at)
            if line is not None:
                digits, end = line[1], line.end()
            else:
                end = data.find(b"\n", at) + 1
                self._cut_line += data[at : end or len(data)]
                if not end:
                    return None
                digits = _NO_DIGIT.split(self._cut_line, 1)[0]
                self._cut_line = bytearray()
            size = int(digits, _HEX) if digits else 0  # the parser refuses a line without a size
            if not size:
                return end
            at = end + size + _CRLF
        self._left = at - len(data)
        return None
