"""The version of this kvatlas."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version of the installed distribution; "0" if it is not installed."""
    try:
        return version("kvatlas")
    except PackageNotFoundError:
        return "0"
