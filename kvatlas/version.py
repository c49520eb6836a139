"""Which kvatlas this is."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The installed distribution's version; "0" for a source tree that is not installed."""
    try:
        return version("kvatlas")
    except PackageNotFoundError:
        return "0"
