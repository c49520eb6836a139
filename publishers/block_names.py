"""Block names for callers that have token ids but no block hashes of their own."""

from collections.abc import Sequence
from hashlib import blake2b

from kvatlas.blocks.hashing import HASH_BYTES, ExtraKeys, extend_chain
from kvatlas.errors import InvalidValue
from kvatlas_publishers.engine_events import EngineHash

NAMESPACE_BYTES = 8
NAME_BYTES = NAMESPACE_BYTES + HASH_BYTES


def block_names(
    token_ids: Sequence[int],
    block_size: int,
    parent: EngineHash | None = None,
    adapter: str | None = None,
    salt: str | None = None,
    extra_keys: Sequence[ExtraKeys] | None = None,
) -> list[EngineHash]:
    """Names of the full blocks: 8 bytes for the adapter and the salt, 8 for the chain.

    Raises InvalidValue for token ids that can't be hashed, and if `parent` is not a name for this adapter and salt.
    """
    namespace = blake2b(repr((adapter, salt)).encode(), digest_size=NAMESPACE_BYTES).digest()
    above: int | None = None
    if parent is not None:
        if not isinstance(parent, bytes) or len(parent) != NAME_BYTES or not parent.startswith(namespace):
            raise InvalidValue(
                f"parent {parent!r:.60}; expected a name that `stored` returned for the same adapter and salt"
            )
        above = int.from_bytes(parent[NAMESPACE_BYTES:], "little")
    packed = extend_chain(token_ids, block_size, above, extra_keys)
    return [namespace + packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
