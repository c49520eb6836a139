"""Errors of the router client.

KvatlasError
 |- NoWorkers        no worker of the pool can take the request now
 `- ClientClosed     a sync client is used outside its `with` block, or in a process other than the one that opened it
"""

from kvatlas.errors import KvatlasError


class NoWorkers(KvatlasError):
    """No worker of the request's pool can take it now: either none is known, or none is alive, up and allowed."""


class ClientClosed(KvatlasError):
    """A sync client is used before it has been entered, after it has been exited, or in a process that was forked in
    the meantime."""
