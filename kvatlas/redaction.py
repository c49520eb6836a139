"""URLs in log lines and errors, without their passwords."""

from urllib.parse import urlsplit


def redact_password(url: str) -> str:
    """The URL with its password replaced by ***."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return url
    return url.replace(f":{password}@", ":***@") if password else url
