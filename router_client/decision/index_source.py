"""The index that answers a router's overlap queries: the store's index, or a copy of it in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvatlas.errors import NotSupported
from kvatlas.index.local_copy.settings import ReplicaSettings
from kvatlas.index.redis.answering_index import AnsweringIndex
from kvatlas.store.connection import Store
from router_client.pricing.overlap import OverlapIndex


@asynccontextmanager
async def open_overlap_index(
    store: Store, index: AnsweringIndex, replica: ReplicaSettings | None
) -> AsyncIterator[OverlapIndex]:
    """Open the store's `index`, or a local copy of it if `replica` gives settings for one. The copy is made in the
    background, without waiting for NATS. Raises NotSupported if the copy needs packages that are not installed."""
    if replica is None:
        yield index
        return
    try:
        from kvatlas.index.local_copy.local_copy import open_replica  # needs the optional packages
    except ModuleNotFoundError as error:
        raise NotSupported(
            f"a replica of the index needs {error.name}, which is not installed: pip install 'kvatlas[replica]'"
        ) from error
    async with open_replica(store, index, replica) as opened:
        yield opened
