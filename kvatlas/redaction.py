"""What may be shown of a URL."""

from urllib.parse import urlsplit


def redact_password(url: str) -> str:
    """A URL as it may be shown: its password replaced by ***."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return url
    return url.replace(f":{password}@", ":***@") if password else url
