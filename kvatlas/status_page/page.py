"""The page as HTML. It loads nothing: style and script are inline, and its content security policy forbids the browser to run
anything else."""

import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from kvatlas.status_page.content import Fact, Section
from kvatlas.status_page.probe import Form, PromptKind
from kvatlas.version import own_version

REFRESH_MS = 2_000
_FOLDER = Path(__file__).parent


def render(role: str, name: str, facts: Sequence[Fact], sections: Sequence[Section], form: Form | None) -> str:
    """`role`: the kind of process; `name`: which one it is."""
    style, script = _part("page.css"), _part("page.js")
    return _template().render(
        role=role,
        name=name,
        facts=facts,
        sections=sections,
        form=form,
        kinds=PromptKind,
        version=own_version(),
        now=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        refresh_ms=REFRESH_MS,
        style=Markup(style),  # noqa: S704 our own files
        script=Markup(script),  # noqa: S704
    )


@cache
def headers() -> Mapping[str, str]:
    """The headers of every page, which say what the browser may do with it."""
    policy = {
        "default-src": "'none'",
        "style-src": _source(_part("page.css")),
        "script-src": _source(_part("page.js")),
        "connect-src": "'self'",
        "img-src": "data:",
        "form-action": "'self'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


@cache
def _part(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8").strip()


def _source(text: str) -> str:
    """A source expression that allows a text of the page in a content security policy."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
