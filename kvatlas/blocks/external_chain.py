"""External chains: keys for blocks that an engine names itself, without publishing their tokens.

    local[i] = XXH3_64(block hash i as text, seed 1337)
    root     = XXH3_64(session id, or "root", as text, seed 1337)
    seq[0]   = XXH3_64(LE64(root) + LE64(local[0]), seed 1337);  seq[i] as in `kvatlas.blocks.hashing`

So, as in our own chain, a key stands for a block and everything before it, whatever the engine's hashes cover. Text is
UTF-8. An integer becomes the text of its 64 bits, 16 lower-case hex digits: -1 and 2^64-1 are the same. Engine and router
compute the same keys from the same hashes. Keys of different chains never mix, because the chain is part of the scope
(`kvatlas.identity.Scope.chain`).
"""

import re
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from kvatlas.blocks.hashing import SEED, chain_of_local_hashes

ROOT = "root"
"""Stands for the parent of a first block that belongs to no session."""
MIN_HASH, MAX_HASH = -(1 << 63), (1 << 64) - 1

_OWN_TEXT = re.compile(r"[0-9A-Fa-f]{16}")


def hash_text(block_hash: int) -> str:
    """A 64-bit hash, signed or unsigned, as users read and write it: 16 hex digits."""
    return f"{block_hash & MAX_HASH:016x}"


def is_hash_text(text: str) -> bool:
    """True if the text can be a 64-bit hash."""
    return _OWN_TEXT.fullmatch(text) is not None


def name_hash(name: str) -> int:
    """The 64-bit hash of a name (a block hash or a root) that is given as text."""
    return xxh3_64_intdigest(name.encode(errors="surrogatepass"), SEED)


def external_chain(names: Iterable[str], root: str = ROOT) -> bytes:
    """Packed sequence hashes of a prompt's blocks, computed from their hashes as text, in order; `root`: the session's id."""
    return chain_of_local_hashes([name_hash(name) for name in names], name_hash(root))
