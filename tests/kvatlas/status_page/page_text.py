"""The text of a status page, without its tags."""

import re
from html import unescape


def texts(html: str) -> str:
    """The texts; a table's cells are separated by ` | `."""
    body = html[html.index("<body") : html.index("<script>")]
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", re.sub(r"</t[dh]>", " | ", body))))
