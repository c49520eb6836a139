"""The layout of a store: its partitions and shards, and whether the store is suitable for an index."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from secrets import token_hex
from typing import NamedTuple

from redis.exceptions import OutOfMemoryError, ResponseError

from kvatlas.errors import LayoutMismatch, Unreachable, UnsuitableStore
from kvatlas.index.protocol import DEFAULT_PARTITIONS, DEFAULT_SHARDS
from kvatlas.index.redis.keys import LAYOUT, LAYOUT_VERSION, SWITCHED_VERSION, layout_key
from kvatlas.store.connection import UNREACHABLE, Store

_ID, _VERSION, _SIDE_INDEX, _ANSWERS, _PUBLISHERS = "id", "version", "side_index", "answers", "publishers"

_LAYOUT = "layout:"
"""Prefix of the fields that list other layouts."""


class Layout(NamedTuple):
    """Settings that all processes of a store agree on. `side_index`: every writer records which block follows which. A store
    may have several layouts, which differ in their `number`: one answers while another is filled next to it. `publishers`:
    other partition counts that publishers may still use in their subjects."""

    partitions: int
    shards: int
    side_index: bool = False
    number: int = 0
    publishers: tuple[int, ...] = ()


@contextmanager
def layout_errors(store: Store) -> Iterator[None]:
    """Translate a store's errors: raises Unreachable if the store does not answer, or has no memory for its layout."""
    try:
        yield
    except OutOfMemoryError as error:
        raise Unreachable(f"{store.name}: it is out of memory (maxmemory), so no layout can be created") from error
    except UNREACHABLE as error:
        raise store.unreachable(error) from error


async def read_layout(store: Store, number: int | None = None) -> Layout | None:
    """The layout with this number, by default the one that answers; None if the store does not have it. Raises LayoutMismatch
    for a different version, or for data that is not from kvatlas."""
    root = await _read_fields(store, 0)
    if not root:
        return None
    if root.get(_VERSION) not in (str(LAYOUT_VERSION), str(SWITCHED_VERSION)):
        raise LayoutMismatch(
            f"{store.name}: layout version {root.get('version')}; this kvatlas expects {LAYOUT_VERSION} or {SWITCHED_VERSION}"
        )
    if number is None:
        number = _answering(root)
    found = await _read_fields(store, number) if number else root
    if not found or (_ANSWERS in found and "partitions" not in found):
        return None  # it has been deleted: only entries about other layouts are left
    partitions, shards = found.get("partitions", ""), found.get("shards", "")
    if not (partitions.isdecimal() and shards.isdecimal() and int(shards) and int(partitions) % int(shards) == 0):
        raise LayoutMismatch(
            f"{store.name}: layout of {partitions!r} partitions and {shards!r} shards; expected numbers, one a divisor of "
            "the other: another program wrote there"
        )
    publishers = tuple(int(count) for count in found.get(_PUBLISHERS, "").split(",") if count)
    return Layout(int(partitions), int(shards), found.get(_SIDE_INDEX) == "1", number, publishers)


async def read_answering(store: Store) -> int | None:
    """The number of the layout that answers; None in a store without layouts."""
    root = await _read_fields(store, 0)
    return _answering(root) if root else None


async def read_numbers(store: Store) -> list[int]:
    """The numbers of the store's layouts, in ascending order."""
    root = await _read_fields(store, 0)
    further = [int(field.removeprefix(_LAYOUT)) for field in root if field.startswith(_LAYOUT)]
    return sorted([*([0] if "partitions" in root else []), *further])


async def switch_layout(store: Store, number: int) -> None:
    """Make this layout answer from now on. Readers notice within a second or two."""
    version = SWITCHED_VERSION if number else LAYOUT_VERSION
    await store.client.hset(LAYOUT, mapping={_ANSWERS: number, _VERSION: version})


async def delete_layout(store: Store, number: int) -> None:
    """Delete a layout that does not answer; the record of which layout does is kept."""
    if number:
        await store.client.unlink(layout_key(number))
        await store.client.hdel(LAYOUT, f"{_LAYOUT}{number}")
    else:
        await store.client.hdel(LAYOUT, "partitions", "shards", _SIDE_INDEX, _PUBLISHERS, _ID)


async def layout_id(store: Store, number: int) -> bytes | None:
    """A random id that changes when a lost layout is recreated; None if there is no layout."""
    found: bytes | None = await store.client.hget(layout_key(number), _ID)
    return found


async def make_layout(
    store: Store,
    partitions: int | None,
    shards: int | None,
    side_index: bool | None = None,
    number: int | None = None,
    publishers: Sequence[int] | None = None,
    *,
    answers: int | None = None,
) -> Layout:
    """The store's layout with this number (default: the one that answers). Creates the layout if it is missing. `publishers`:
    see Layout; None: those of the layout that answers, if its partition count differs. `answers`: the number of the layout that
    answers, in case the store does not say. Raises LayoutMismatch if the layout differs from the request."""
    current = await read_layout(store)
    if number is None:
        number = await read_answering(store) or answers or 0
    found = await read_layout(store, number)
    if found is None:
        await _write_layout(store, partitions, shards, side_index, number, publishers, current, answers)
        found = await read_layout(store, number)
        assert found is not None
    if (partitions or found.partitions, shards or found.shards) != (found.partitions, found.shards):
        raise LayoutMismatch(
            f"{store.name}: laid out with {found.partitions} partitions and {found.shards} shards; "
            f"asked for {partitions or found.partitions} and {shards or found.shards}"
        )
    if side_index not in (None, found.side_index):
        raise LayoutMismatch(
            f"{store.name}: laid out {'with' if found.side_index else 'without'} a side index; asked for one that is "
            f"{'on' if side_index else 'off'}: leave the flag out, or empty the store first"
        )
    return found


async def _write_layout(
    store: Store,
    partitions: int | None,
    shards: int | None,
    side_index: bool | None,
    number: int,
    publishers: Sequence[int] | None,
    current: Layout | None,
    answers: int | None,
) -> None:
    """Write a new layout. By default, it has the partitions and the side index of the current one, and also takes messages from
    that one's publishers."""
    beside = current or Layout(DEFAULT_PARTITIONS, DEFAULT_SHARDS)
    wanted = Layout(partitions or beside.partitions, shards or DEFAULT_SHARDS)
    if wanted.partitions % wanted.shards:
        raise LayoutMismatch(f"{wanted.shards} shards; expected a divisor of {wanted.partitions} partitions")
    if publishers is None:
        publishers = (current.partitions, *current.publishers) if current else ()
    others = set(publishers) - {wanted.partitions}
    fields: dict[str, int | str] = {"partitions": wanted.partitions, "shards": wanted.shards, _ID: token_hex(8)}
    fields[_SIDE_INDEX] = int(beside.side_index if side_index is None else side_index)
    if others:
        fields[_PUBLISHERS] = ",".join(map(str, sorted(others)))
    answering = current.number if current else number if answers is None else answers
    async with store.client.pipeline(transaction=True) as pipeline:
        pipeline.hsetnx(LAYOUT, _VERSION, SWITCHED_VERSION if answering else LAYOUT_VERSION)
        if answering:
            pipeline.hsetnx(LAYOUT, _ANSWERS, answering)
        if number:
            pipeline.hsetnx(LAYOUT, f"{_LAYOUT}{number}", 1)
        for field, value in fields.items():
            pipeline.hsetnx(layout_key(number), field, value)
        await pipeline.execute()


async def _read_fields(store: Store, number: int) -> dict[str, str]:
    found = await store.client.hgetall(layout_key(number))
    return {key.decode(): value.decode() for key, value in found.items()}


def _answering(root: Mapping[str, str]) -> int:
    number = root.get(_ANSWERS, "0")
    return int(number) if number.isdecimal() else 0


async def check_suitable(store: Store) -> None:
    """Check the store's configuration. Raises UnsuitableStore if any primary would evict keys or is a read-only replica."""
    cure = ""
    try:
        policies = await store.read_config("maxmemory-policy")
    except ResponseError:  # managed services refuse CONFIG; INFO has the setting, without the server's name
        found = [one.get("maxmemory_policy", "noeviction") for one in await store.read_info("memory")]
        policies = {"": next((policy for policy in found if policy != "noeviction"), "noeviction")}
        cure = "; set it in the service's own settings (parameter group), since CONFIG is refused here"
    for server, policy in policies.items():
        if policy != "noeviction":
            line = f"maxmemory-policy is {policy}; expected noeviction, since an evicted key is a wrong answer{cure}"
            raise UnsuitableStore(f"{store.name}: {f'{server}: ' if server else ''}{line}")
    if not store.is_cluster:
        role = await store.client.execute_command("ROLE")
        if role[0] in (b"slave", "slave"):
            raise UnsuitableStore(f"{store.name} is a replica; expected a primary")
