"""What a status page says, without its tags."""

import re
from html import unescape


def texts(html: str) -> str:
    """Cells of a table apart by ` | `."""
    body = html[html.index("<body") : html.index("<script>")]
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", re.sub(r"</t[dh]>", " | ", body))))
