"""The index that a router's overlaps come from: the store's, or a replica of it in this process."""

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
    """The store's `index`, or over it a replica if there are settings for one: it copies in the background, so neither NATS
    nor the copy is waited for. Raises NotSupported if a replica needs packages that are not installed."""
    if replica is None:
        yield index
        return
    try:
        from kvatlas.index.local_copy.local_copy import open_replica  # needs the extra
    except ModuleNotFoundError as error:
        raise NotSupported(
            f"a replica of the index needs {error.name}, which is not installed: pip install 'kvatlas[replica]'"
        ) from error
    async with open_replica(store, index, replica) as opened:
        yield opened
