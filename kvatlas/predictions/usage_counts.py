"""Usage counted from answers, in the pool's slot of the store. The counts outlive the routers that made them."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import msgpack

from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope, scope_from_canonical
from kvatlas.reservations.redis_calls import call_pool
from kvatlas.store.connection import Store

MOST_USERS = 10_000
"""Maximum number of users per pool; any further ones are counted together, without names."""
USERS_A_REPORT = 200


class User(NamedTuple):
    """The user to whom answers belong. `program`: the client in the clients file that sent the requests; empty: unknown."""

    scope: Scope
    program: str = ""

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.scope.canonical, self.program])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "User | None":
        """Unpack a user. Returns None for users whose names are not kept. Raises InvalidValue."""
        if not packed:
            return None
        try:
            canonical, program = msgpack.unpackb(packed)
            return cls(scope_from_canonical(canonical), str(program))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidValue(f"not a user of a pool: {packed[:64]!r}") from error


class AnswerUse(NamedTuple):
    """Sums over the answers that report cached prompt tokens. `saved_us`: the time, as priced, that it would take to compute
    these tokens."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    saved_us: int = 0

    def plus(self, other: Self) -> "AnswerUse":
        return AnswerUse(*(a + b for a, b in zip(self, other, strict=True)))


def usage_keys(pool_id: str) -> list[str]:
    return [f"kva:{{pool:{pool_id}}}:usage", f"kva:{{pool:{pool_id}}}:usage-reports"]


async def add_answer_use(
    store: Store, router_id: str, number: int, pool_id: str, used: Mapping[User, AnswerUse]
) -> None:
    """Add to the totals. A report whose number is not above that of the router's last report changes nothing. Takes at most
    USERS_A_REPORT users. Raises Unreachable; the report may then be sent again."""
    amounts = [word for user, use in used.items() for word in (user.pack(), *use)]
    await call_pool(store, "used", pool_id, [router_id, number, MOST_USERS, *amounts], keys=usage_keys(pool_id))


async def read_answer_use(store: Store, pool_id: str) -> dict[User | None, AnswerUse]:
    """Read the totals. Raises Unreachable, or InvalidValue if they can't be read."""
    found: dict[User | None, AnswerUse] = {}
    cursor = -1
    while cursor:
        cursor, some = await store.ask(store.client.hscan(usage_keys(pool_id)[0], max(cursor, 0), count=500))
        for packed, totals in some.items():
            found[User.unpack(packed)] = AnswerUse(*map(int, totals.split()))
    return found
