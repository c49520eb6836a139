"""The format of writers' notices about a shared store."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import WireError
from kvatlas.identity import MAX_NAME_BYTES, Scope
from kvatlas.validation import MAX_BLOCK_BYTES
from kvatlas_publishers.ledger.connectors.shared_store_notice import (
    MAX_NOTICE_BYTES,
    AdapterGone,
    GoneFromStore,
    StoreCleared,
    StoredInStore,
    decode,
    encode,
)

SCOPE = Scope("m", "t", None, "tenant")
names = st.text(min_size=1, max_size=5)
scopes = st.builds(Scope, names, names, st.none() | names, names)
hashes = st.binary(min_size=1, max_size=4).map(lambda some: some * 8)
changes = st.one_of(
    st.builds(StoredInStore, scopes, hashes, st.none() | st.binary(min_size=8, max_size=8)),
    st.builds(GoneFromStore, scopes, hashes),
    st.builds(StoreCleared),
    st.builds(AdapterGone, names),
)


@given(st.integers(1, 4_096), st.booleans(), st.lists(changes), st.integers(0, MAX_BLOCK_BYTES))
def test_what_is_packed_is_read(size: int, keys: bool, told: list[StoredInStore], block_bytes: int) -> None:
    notices = [decode(payload) for payload in encode(size, keys, told, block_bytes=block_bytes)]
    read = {(notice.block_size, notice.uses_keys, notice.block_bytes) for notice in notices}
    assert read == {(size, keys, block_bytes)}
    assert [change for notice in notices for change in notice.changes] == told


def test_large_changes_are_cut_into_notices_that_the_bus_takes() -> None:
    long = Scope(*("x" * MAX_NAME_BYTES for _ in range(4)))
    chain = b"".join(n.to_bytes(8, "little") for n in range(20_000))
    payloads = list(encode(16, False, [StoredInStore(long, chain, None), *[GoneFromStore(long, chain[:8])] * 500]))
    assert max(map(len, payloads)) < MAX_NOTICE_BYTES
    told = [change for payload in payloads for change in decode(payload).changes]
    parts = [change for change in told if isinstance(change, StoredInStore)]
    assert b"".join(part.hashes for part in parts) == chain
    assert [part.parent for part in parts] == [None, *(part.hashes[-8:] for part in parts[:-1])]
    assert len(told) == len(parts) + 500


@pytest.mark.parametrize(
    "raw",
    [
        b"\xc1",
        1,
        [],
        [2, 16, False, []],
        [1, 16, False],
        [1, 0, False, []],
        [1, 16, 1, []],
        [1, 16, False, [], -1],
        [1, 16, False, [], 1 << 32],
        [1, 16, False, [], True],
        [1, 16, False, [], 1, 1],
        [1, 16, False, {}],
        [1, 16, False, [[1, ["m", "t", None, "x"], b"1234567", None]]],
        [1, 16, False, [[1, ["m", "t", None, "x"], b"", None]]],
        [1, 16, False, [[1, ["m", "t", None, "x"], b"12345678", b"1"]]],
        [1, 16, False, [[1, ["m", "t", None], b"12345678", None]]],
        [1, 16, False, [[1, ["m", "t", None, ""], b"12345678", None]]],
        [1, 16, False, [[2, "m", b"12345678"]]],
        [1, 16, False, [[4, 7]]],
        [1, 16, False, [[5]]],
        [1, 16, False, [None]],
    ],
)
def test_what_is_no_notice_is_refused_in_one_line(raw: object) -> None:
    payload = raw if isinstance(raw, bytes) else msgpack.packb(raw)
    with pytest.raises(WireError) as refused:
        decode(payload)
    assert ("\n" not in str(refused.value) and "expected" in str(refused.value)) or "not msgpack" in str(refused.value)
