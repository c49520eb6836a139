"""Remembers, in one process, which worker has each object. The total space is bounded, and all tenants have an equal
right to it."""

from collections import OrderedDict
from collections.abc import Mapping

SPARE = 0.01
"""Share of the space that is freed each time; freeing this much in one go keeps the cost low."""


class KnownHolders:
    """Holds at most `most` objects. When it is full, the tenants with the most objects lose their oldest objects."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str | None, OrderedDict[str, str]] = {}
        self._size = 0

    def find(self, tenant_id: str | None, id: str) -> str | None:
        """The worker that has a tenant's object, if remembered."""
        of_tenant = self._known.get(tenant_id)
        return None if of_tenant is None else of_tenant.get(id)

    def add(self, tenant_id: str | None, holders: Mapping[str, str]) -> None:
        """Remember the workers of a tenant's objects, by object id."""
        of_tenant = self._known.setdefault(tenant_id, OrderedDict())
        self._size -= len(of_tenant)
        for id, worker_id in holders.items():
            of_tenant[id] = worker_id
            of_tenant.move_to_end(id)
        self._size += len(of_tenant)
        if self._size > self._most:
            self._make_room()

    def _make_room(self) -> None:
        part = self._equal_part()
        for tenant_id, of_tenant in list(self._known.items()):
            while len(of_tenant) > part:
                of_tenant.popitem(last=False)
                self._size -= 1
            if not of_tenant:
                del self._known[tenant_id]

    def _equal_part(self) -> int:
        """The largest number of objects that each tenant may keep so that everything fits, with room to spare. Tenants
        with fewer objects leave the rest of their share to the others."""
        room = int(self._most * (1 - SPARE))
        sizes = sorted(map(len, self._known.values()))
        for place, size in enumerate(sizes):
            part = room // (len(sizes) - place)
            if size > part:
                return part
            room -= size
        return room
