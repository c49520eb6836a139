"""Finds out where the chunks of a body end."""

import re

_CRLF = 2
_HEX = 16
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]+)[^\n]*\n")
_NO_DIGIT = re.compile(rb"[^0-9A-Fa-f]")


class ChunkedBody:
    """Follows the chunks of a body (RFC 9112, 7.1) without reading their content; the data may be cut at any point. Nothing is
    checked, because the HTTP parser reads the same data."""

    __slots__ = ("_cut_line", "_left")

    def __init__(self) -> None:
        self._left = 0
        """How many bytes of a chunk, and of the line end after it, have not arrived yet."""
        self._cut_line = bytearray()
        """The part of a chunk's size line that has already arrived."""

    def find_trailers(self, data: bytearray, start: int) -> int | None:
        """Follow new data, from `start` on. Returns the end of the last chunk's line, after which the trailers follow; None if
        that line has not arrived yet."""
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
