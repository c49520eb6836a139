"""A simple parser of a whole text's events, as the standard defines them: the reference for the incremental one."""

import re


def naive_events(text: bytes) -> list[tuple[str, bytes | None]]:
    """The type and the data of each event, comments and blank lines included, and one at the end without its blank line."""
    lines = re.split(rb"\r\n|\r|\n", text.removeprefix(b"\xef\xbb\xbf"))
    events: list[tuple[str, bytes | None]] = []
    type, begun = b"", False
    data: list[bytes] = []
    for number, line in enumerate(lines):
        if not line and number < len(lines) - 1:
            events.append((type.decode("utf-8", "replace"), b"\n".join(data) if data else None))
            type, data, begun = b"", [], False
        elif line:
            begun = True
            name, _, value = line.partition(b":")
            value = value[1:] if value[:1] == b" " else value
            if name == b"data":
                data.append(value)
            elif name == b"event":
                type = value
    if begun:
        events.append((type.decode("utf-8", "replace"), b"\n".join(data) if data else None))
    return events
