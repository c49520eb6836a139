"""The layout of a store: partitions and shards, and whether the index can be kept there."""

from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex

from redis.exceptions import OutOfMemoryError, ResponseError

from kvatlas.errors import LayoutMismatch, Unreachable, UnsuitableStore
from kvatlas.index.redis.keys import LAYOUT, LAYOUT_VERSION, READABLE_VERSIONS
from kvatlas.store.connection import UNREACHABLE, Store

_ID = "id"

DEFAULT_PARTITIONS = 64
DEFAULT_SHARDS = 1


@contextmanager
def layout_errors(store: Store) -> Iterator[None]:
    """Raises Unreachable for a store that does not answer, and for one without memory for its layout."""
    try:
        yield
    except OutOfMemoryError as error:
        raise Unreachable(f"{store.name}: it is out of memory (maxmemory), and has to be laid out") from error
    except UNREACHABLE as error:
        raise store.unreachable(error) from error


async def read_layout(store: Store) -> tuple[int, int] | None:
    """(partitions, shards); None for a store without a layout. Raises LayoutMismatch for one of another version, or none of
    kvatlas."""
    found = {key.decode(): value.decode() for key, value in (await store.client.hgetall(LAYOUT)).items()}
    if not found:
        return None
    if found.get("version") not in {str(version) for version in READABLE_VERSIONS}:
        raise LayoutMismatch(
            f"{store.name}: layout version {found.get('version')}; this kvatlas expects {LAYOUT_VERSION}"
        )
    partitions, shards = found.get("partitions", ""), found.get("shards", "")
    if not (partitions.isdecimal() and shards.isdecimal() and int(shards) and int(partitions) % int(shards) == 0):
        raise LayoutMismatch(
            f"{store.name}: layout of {partitions!r} partitions and {shards!r} shards; expected numbers, one a divisor of "
            "the other: another program wrote there"
        )
    return int(partitions), int(shards)


async def layout_id(store: Store) -> bytes | None:
    """What differs between a layout and one made after the store lost it; None without a layout."""
    found: bytes | None = await store.client.hget(LAYOUT, _ID)
    return found


async def make_layout(store: Store, partitions: int | None, shards: int | None) -> tuple[int, int]:
    """(partitions, shards) of the store's layout, made if there is none, and brought to this version: processes that don't
    know it refuse to start there from then on. Raises LayoutMismatch if these differ from those asked for."""
    wanted = (partitions or DEFAULT_PARTITIONS, shards or DEFAULT_SHARDS)
    found = await read_layout(store)
    if found is None:
        if wanted[0] % wanted[1]:
            raise LayoutMismatch(f"{wanted[1]} shards; expected a divisor of {wanted[0]} partitions")
        async with store.client.pipeline(transaction=True) as pipeline:
            fields = {"version": LAYOUT_VERSION, "partitions": wanted[0], "shards": wanted[1], _ID: token_hex(8)}
            for field, value in fields.items():
                pipeline.hsetnx(LAYOUT, field, value)
            await pipeline.execute()
        found = await read_layout(store)
        assert found is not None
    if (partitions or found[0], shards or found[1]) != found:
        raise LayoutMismatch(
            f"{store.name}: laid out with {found[0]} partitions and {found[1]} shards; asked for {wanted[0]} and {wanted[1]}"
        )
    await store.client.hset(LAYOUT, "version", str(LAYOUT_VERSION))
    return found


async def check_suitable(store: Store) -> None:
    """Raises UnsuitableStore if the store would evict keys by itself, or is a read-only replica."""
    try:
        found = await store.client.config_get("maxmemory-policy")
    except ResponseError:
        return  # a managed service may hide CONFIG; `kvatlas doctor` reports what it could not check
    policy = found.get("maxmemory-policy") if isinstance(found, dict) else None
    if policy is not None and policy != "noeviction":
        raise UnsuitableStore(
            f"{store.name}: maxmemory-policy is {policy}; expected noeviction, since an evicted key is a wrong answer"
        )
    if not store.is_cluster:
        role = await store.client.execute_command("ROLE")
        if role[0] in (b"slave", "slave"):
            raise UnsuitableStore(f"{store.name} is a replica; expected a primary")
