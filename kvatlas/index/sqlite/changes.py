"""Dictionaries that track which keys have changed, so that only these are written to the file, and where their rows are."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TrackedDict(dict[K, V]):
    """Records every key that is set or deleted in `changed`, in order. Keys that `update` loads are not recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[K, None] = {}

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.changed[key] = None

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        self.changed[key] = None

    def pop(self, key: K, *default: Any) -> Any:
        self.changed[key] = None
        return super().pop(key, *default)

    def setdefault(self, key: K, default: V) -> V:
        if key not in self:
            self[key] = default
        return self[key]


class _Values(dict[bytes, bytes]):
    """One scope's values; see `ValuesByScope`."""

    def __init__(self, scope_id: bytes, changed: dict[tuple[bytes, bytes], None]) -> None:
        super().__init__()
        self._scope_id = scope_id
        self._changed = changed

    def __setitem__(self, key: bytes, value: bytes) -> None:
        super().__setitem__(key, value)
        self._changed[self._scope_id, key] = None

    def __delitem__(self, key: bytes) -> None:
        super().__delitem__(key)
        self._changed[self._scope_id, key] = None

    def pop(self, key: bytes, *default: Any) -> Any:
        self._changed[self._scope_id, key] = None
        return super().pop(key, *default)

    def update(self, values: Mapping[bytes, bytes]) -> None:  # type: ignore[override]  # one form is used
        super().update(values)
        self._changed.update(((self._scope_id, key), None) for key in values)


class ValuesByScope(dict[bytes, dict[bytes, bytes]]):
    """Values by scope and key, as in the memory index; `changed` lists the (scope id, key) of those that were set or deleted,
    in order."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[tuple[bytes, bytes], None] = {}

    def setdefault(self, scope_id: bytes, default: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The values of the scope, tracked; `default` must be empty."""
        found = self.get(scope_id)
        if found is None:
            found = self[scope_id] = _Values(scope_id, self.changed)
        return found

    def load(self, scope_id: bytes, key: bytes, value: bytes) -> None:
        """Set a value that is already in the file."""
        dict.__setitem__(self.setdefault(scope_id, {}), key, value)


class RowIds:
    """The row number of each value. New values get the next numbers, so that values that are stored together are together in
    the file, whatever their hashes are, and a change of a chain writes few pages."""

    def __init__(self) -> None:
        self._ids: dict[bytes, dict[bytes, int]] = {}
        self._last = 0
        self.gone: list[tuple[bytes, bytes]] = []
        """The keys of rows that are being deleted; if that fails, they are described again."""

    def load(self, id: int, scope_id: bytes, key: bytes) -> None:
        """Record a row that the file already has."""
        self._ids.setdefault(scope_id, {})[key] = id
        self._last = max(self._last, id)

    def of_value(self, scope_id: bytes, key: bytes) -> int:
        """The number of a row that is about to be written."""
        ids = self._ids.setdefault(scope_id, {})
        if key not in ids:
            self._last += 1
            ids[key] = self._last
        return ids[key]

    def of_gone(self, scope_id: bytes, key: bytes) -> int | None:
        """The number of a row that is about to be deleted; None if there is no row. It is kept until `forget_gone`."""
        id = self._ids.get(scope_id, {}).get(key)
        if id is not None:
            self.gone.append((scope_id, key))
        return id

    def forget_gone(self) -> None:
        """Drop the numbers of rows that have now been deleted."""
        for scope_id, key in self.gone:
            self._ids[scope_id].pop(key, None)
        self.gone.clear()


@contextmanager
def keep_on_error(changed: Sequence[dict[Any, None]]) -> Iterator[None]:
    """If the block raises, restore these records of changes to what they held before it, plus what has been added in the
    meantime."""
    before = [dict(one) for one in changed]
    try:
        yield
    except BaseException:
        for one, content in zip(changed, before, strict=True):
            one.update(content)
        raise
