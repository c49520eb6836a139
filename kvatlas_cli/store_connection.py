"""The store that a command reads, opened and closed."""

from contextlib import AbstractAsyncContextManager

from kvatlas.settings import Settings
from kvatlas.store.connection import Store, connected_store
from kvatlas_cli.output import print_notice


def connect_store(settings: Settings) -> AbstractAsyncContextManager[Store]:
    """The store of the settings, closed at the end; a notice says why the command waits. Raises Unreachable."""
    return connected_store(settings.redis, wait=settings.wait, on_wait=print_notice)
