"""A folder of secrets that only its owner can read: one file per user. Existing files are kept when a user is added."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from urllib.parse import quote, unquote, urlsplit

from kvatlas.errors import InvalidValue

PASSWORD_BYTES = 24
_NEXT_URL = re.compile(r",(?=\s*[a-z+]+://)")
"""Separates URLs; the hosts of one Sentinel URL are also separated by commas."""


class SecretFolder:
    """Raises OSError, whose message names the file, for a folder that can't be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, name: str, text: str) -> Path:
        """Write a file atomically, readable only by its owner."""
        file = self.folder / name
        partial = self.folder / f".{name}.{os.getpid()}"
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(text)
        partial.rename(file)
        return file

    def keep(self, name: str, make: Callable[[], str]) -> str:
        """The content of the file, which is created if it is missing."""
        file = self.folder / name
        if not file.exists():
            self.write(name, make() + "\n")
        return file.read_text().strip()

    def passwords(self, users: list[str], suffix: str, server_url: str) -> Mapping[str, str]:
        """Each user's password, in a file `<user>.<suffix>` with the URL to connect with. Raises InvalidValue for a file with
        any other content."""
        found: dict[str, str] = {}
        for user in users:
            name = f"{user}.{suffix}"
            kept = self.keep(name, lambda user=user: login_url(server_url, user, token_hex(PASSWORD_BYTES)))  # type: ignore[misc]
            password = _password_of(kept, user)
            if password is None:
                raise InvalidValue(
                    f"{self.folder / name} is not a URL of user {user}; expected a file that this command wrote, or none"
                )
            self.write(name, login_url(server_url, user, password) + "\n")  # the server's address may have changed
            found[user] = password
        return found


def login_url(server_url: str, user: str, password: str) -> str:
    """The URL (or several, separated by commas) with this user's login."""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@"
    urls = [urlsplit(one.strip()) for one in _NEXT_URL.split(server_url)]
    return ",".join(one._replace(netloc=login + one.netloc.rpartition("@")[2]).geturl() for one in urls)


def _password_of(url: str, user: str) -> str | None:
    try:
        parts = urlsplit(_NEXT_URL.split(url)[0])
        same = unquote(parts.username or "") == user
    except ValueError:
        return None
    return unquote(parts.password) if same and parts.password else None
