"""The bus message: round trip, and each error for bytes that are not a message."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.digest import WORDS
from kvatlas.blocks.hashing import pack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import (
    EVENTS,
    INCARNATION,
    MAX_MESSAGE_BYTES,
    MESSAGE_VERSION,
    SCOPES,
    SEQ,
    TS_US,
    VERSION,
    VERSION_WITH_MARKS,
    VERSION_WITH_TIER_BYTES,
    WORKER_ID,
    decode,
    decode_raw,
    encode,
    from_raw,
    to_raw,
)
from kvatlas.errors import WireError
from kvatlas.events import Checkpoint, Message, Removed, ScopeUse, SnapshotEnd, Stored
from kvatlas.identity import Scope
from tests.kvatlas.strategies import messages

SCOPE = Scope("model", "tokenizer", "adapter", "tenant")
USE = ScopeUse(SCOPE, 16, 2 << 20)
ID = SCOPE.scope_id
DIGEST = [0] * WORDS


def message_of(*events: Any) -> Message:
    return Message("w-1", 7, 3, list(events), {ID: USE}, 1_700_000_000_000_000)


def raw(*events: Any) -> list[Any]:
    """A valid message as the wire's own arrays, not yet packed."""
    scopes = {ID: ["model", "tokenizer", "adapter", "tenant", 16, 2 << 20]}
    return [VERSION, "w-1", 7, 3, 1_700_000_000_000_000, scopes, list(events)]


STORED = [1, ID, 0, pack_hashes([1, 2]), None, 0, 0]


@given(messages())
def test_a_decoded_message_equals_the_encoded_one(message: Message) -> None:
    again = decode(encode(message))
    assert again == message
    assert from_raw(to_raw(message)) == message
    assert encode(again) == encode(message)


def test_the_layout_on_the_wire() -> None:
    stored = Stored(ID, Tier.CPU_DRAM, pack_hashes([1, 2]), pack_hashes([9]), 4)
    removed = Removed(ID, Tier.HBM, pack_hashes([1]))
    sent = msgpack.unpackb(encode(message_of(stored, removed)), strict_map_key=False)
    assert sent == raw([1, ID, 2, pack_hashes([1, 2]), pack_hashes([9]), 4, 0], [2, ID, 0, pack_hashes([1])])


def test_other_sizes_in_single_tiers_come_with_the_chain_before_them_and_only_then_in_version_4() -> None:
    use = ScopeUse(SCOPE, 16, 2 << 20, ((Tier.CPU_DRAM, 1 << 20), (Tier.LOCAL_SSD, 7)))
    message = Message("w-1", 7, 3, [Removed(ID, Tier.HBM, pack_hashes([1]))], {ID: use}, 1)
    sent = msgpack.unpackb(encode(message), strict_map_key=False)
    assert sent[MESSAGE_VERSION] == VERSION_WITH_TIER_BYTES
    assert sent[SCOPES] == {
        ID: ["model", "tokenizer", "adapter", "tenant", 16, 2 << 20, "own", {2: 1 << 20, 3: 7}],
    }
    assert decode(encode(message)) == message
    sent[MESSAGE_VERSION] = VERSION_WITH_TIER_BYTES - 1
    with pytest.raises(WireError, match="expected four names"):
        decode_raw(msgpack.packb(sent))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (7, "bytes by tier 7; expected a map of fewer than 5"),
        ({1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, "expected a map of fewer than 5"),
        ({0: 1}, "bytes of tier 0; expected 1 to 4"),
        ({5: 1}, "bytes of tier 5"),
        ({"cpu": 1}, "bytes of tier 'cpu'"),
        ({2: 0}, "bytes 0 in tier 2; expected 1 to 4294967295"),
        ({2: 1 << 32}, "bytes 4294967296 in tier 2"),
        ({2: 16.0}, r"bytes 16\.0 in tier 2"),
    ],
)
def test_wrong_sizes_of_tiers_are_refused(sizes: Any, text: str) -> None:
    message = raw(list(STORED))
    message[MESSAGE_VERSION] = VERSION_WITH_TIER_BYTES
    message[SCOPES] = {ID: ["model", "tokenizer", "adapter", "tenant", 16, 2 << 20, "own", sizes]}
    with pytest.raises(WireError, match=text):
        decode_raw(msgpack.packb(message))


def test_a_valid_message_is_decoded() -> None:
    assert decode(msgpack.packb(raw(STORED))) == message_of(Stored(ID, Tier.HBM, pack_hashes([1, 2])))


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_one_line(payload: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode(payload)
    assert len(str(caught.value).splitlines()) == 1


@given(messages(), st.data())
def test_a_truncated_message_is_refused(message: Message, data: st.DataObject) -> None:
    payload = encode(message)
    with pytest.raises(WireError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))])


@given(messages(), st.data())
def test_a_damaged_message_is_decoded_or_refused_cleanly(message: Message, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(WireError):
        decode(bytes(payload))


def test_a_message_beyond_the_limit_is_refused_without_decoding() -> None:
    with pytest.raises(WireError, match=str(MAX_MESSAGE_BYTES)):
        decode_raw(b"\x00" * (MAX_MESSAGE_BYTES + 1))


def _set(*path: Any, to: Any) -> Callable[[list[Any]], None]:
    def change(message: list[Any]) -> None:
        place: Any = message
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


def _event(*event: Any) -> Callable[[list[Any]], None]:
    return _set(EVENTS, 0, to=list(event))


def _marks(*event: Any) -> Callable[[list[Any]], None]:
    """An event in a message of the version with marks."""

    def change(message: list[Any]) -> None:
        message[MESSAGE_VERSION], message[EVENTS] = VERSION_WITH_MARKS, [list(event)]

    return change


def _drop(index: int) -> Callable[[list[Any]], None]:
    def change(message: list[Any]) -> None:
        del message[index]

    return change


HASHES = pack_hashes([1])
WRONG: dict[str, tuple[Callable[[list[Any]], None], str]] = {
    "newer version": (_set(MESSAGE_VERSION, to=5), "version 5; expected 1 to 4"),
    "a list of versions": (_set(MESSAGE_VERSION, to=[1]), "version"),
    "no version": (_set(MESSAGE_VERSION, to="1"), "version '1'"),
    "six fields": (_drop(EVENTS), "6 fields; expected 7"),
    "eight fields": (lambda message: message.append(0), "8 fields; expected 7"),
    "worker with a dot": (_set(WORKER_ID, to="a.b"), "worker id 'a.b'"),
    "worker not text": (_set(WORKER_ID, to=5), "worker id 5"),
    "incarnation 0": (_set(INCARNATION, to=0), "incarnation 0"),
    "negative incarnation": (_set(INCARNATION, to=-1), "incarnation -1"),
    "float incarnation": (_set(INCARNATION, to=1.0), r"incarnation 1\.0"),
    "bool incarnation": (_set(INCARNATION, to=True), "incarnation True"),
    "negative seq": (_set(SEQ, to=-1), "seq -1"),
    "seq of 54 bits": (_set(SEQ, to=1 << 53), "seq 9007199254740992"),
    "seq text": (_set(SEQ, to="3"), "seq '3'"),
    "negative time": (_set(TS_US, to=-1), "ts_us -1"),
    "float time": (_set(TS_US, to=0.5), r"ts_us 0\.5"),
    "scopes not a map": (_set(SCOPES, to=[]), "expected a map"),
    "events not an array": (_set(EVENTS, to={}), "an array"),
    "event not an array": (_set(EVENTS, 0, to=1), "event is 1; expected an array"),
    "empty event": (_event(), "expected an array"),
    "code 0": (_event(0), "code 0; expected 1 to 7"),
    "code 8": (_event(8), "code 8"),
    "code text": (_event("stored"), "code 'stored'"),
    "stored too short": (_event(1, ID, 0, HASHES), "event 1 has 4 fields"),
    "stored too long": (_event(1, ID, 0, HASHES, None, 0, 0, 0), "event 1 has 8 fields"),
    "removed too long": (_event(2, ID, 0, HASHES, None), "event 2 has 5 fields"),
    "cleared with a field": (_event(3, 0), "event 3 has 2 fields"),
    "begin with a field": (_event(4, 0), "event 4 has 2 fields"),
    "unknown scope": (_event(2, b"12345678", 0, HASHES), "does not describe"),
    "scope id too short": (_event(2, ID[:7], 0, HASHES), "does not describe"),
    "scope id text": (_event(2, "12345678", 0, HASHES), "does not describe"),
    "tier 5": (_event(2, ID, 5, HASHES), "tier 5; expected 0 to 4"),
    "tier -1": (_event(2, ID, -1, HASHES), "tier -1"),
    "tier name": (_event(2, ID, "hbm", HASHES), "tier 'hbm'"),
    "tier true": (_event(2, ID, True, HASHES), "tier True"),
    "no hashes": (_event(2, ID, 0, b""), "not packed"),
    "hashes cut": (_event(2, ID, 0, HASHES[:7]), "not packed"),
    "hashes as integers": (_event(2, ID, 0, [1]), "not packed"),
    "parent cut": (_event(1, ID, 0, HASHES, HASHES[:4], 0, 0), "expected 8 bytes or nil"),
    "parent integer": (_event(5, ID, 0, HASHES, 1, 0, 0), "expected 8 bytes or nil"),
    "negative first index": (_event(1, ID, 0, HASHES, None, -1, 0), "first index -1"),
    "first index text": (_event(1, ID, 0, HASHES, None, "0", 0), "first index '0'"),
    "reserved field 1": (_event(1, ID, 0, HASHES, None, 0, 1), "last field is 1; it is reserved"),
    "reserved field with a bit": (_event(5, ID, 0, HASHES, None, 0, 64), "last field is 64; it is reserved"),
    "reserved field negative": (_event(1, ID, 0, HASHES, None, 0, -64), "last field is -64; it is reserved"),
    "reserved field text": (_event(1, ID, 0, HASHES, None, 0, ""), "last field is ''; it is reserved"),
    "reserved field false": (_event(1, ID, 0, HASHES, None, 0, False), "last field is False; it is reserved"),
    "end without a digest": (_event(6, 1), "event 6 needs a digest"),
    "end with a short digest": (_event(6, 1, DIGEST[1:]), "event 6 needs a digest of 15"),
    "end with a negative word": (_event(6, 1, [-1, *DIGEST[1:]]), "event 6 has digest"),
    "end with a text word": (_event(6, 1, ["0", *DIGEST[1:]]), "event 6 has digest"),
    "negative chunk count": (_event(6, -1, DIGEST), "snapshot end counts -1 chunks"),
    "checkpoint without a digest": (_event(7), "event 7 needs a digest"),
    "checkpoint with a map": (_event(7, {}), "event 7 needs a digest"),
    "checkpoint beyond 53 bits": (_event(7, [1 << 53, *DIGEST[1:]]), "event 7 has digest"),
    "digest of marks in version 1": (_event(7, [*DIGEST, 0, 0, 0, 0, 0, 0]), "event 7 needs a digest of 15 integers"),
    "digest with half of the marks": (_marks(7, [*DIGEST, 0, 0, 0]), "event 7 needs a digest of 15 or 21"),
    "code 11": (_marks(11), "code 11; expected 1 to 10"),
    "begin that drops too many": (_marks(4, 256), "drops 256 blocks"),
    "begin that drops text": (_marks(4, "1"), "drops '1' blocks"),
    "begin that drops true": (_marks(4, True), "drops True blocks"),
    "begin with two fields": (_marks(4, 0, 0), "event 4 has 3 fields"),
    "marked too long": (_marks(8, ID, HASHES, 0), "event 8 has 4 fields"),
    "marked in an unknown scope": (_marks(8, b"12345678", HASHES), "does not describe"),
    "unmarked nothing": (_marks(9, ID, b""), "not packed"),
    "marked hashes cut": (_marks(8, ID, HASHES[:7]), "not packed"),
    "heads without bits": (_marks(10, ID, HASHES), "event 10 has 3 fields"),
    "heads with bits of another length": (_marks(10, ID, HASHES, bytes(16)), "one for each hash"),
    "heads with bits as a number": (_marks(10, ID, HASHES, 1), "one for each hash"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_names_what_is_wrong(name: str) -> None:
    change, text = WRONG[name]
    message = raw(list(STORED))
    change(message)
    with pytest.raises(WireError, match=text) as caught:
        decode_raw(msgpack.packb(message))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", msgpack.packb({}), msgpack.packb(1), b"\x93\x01"])
def test_msgpack_that_is_not_a_message_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_raw(payload)


SCOPE_ENTRIES: dict[str, tuple[Any, str]] = {
    "not an array": (1, "expected four names"),
    "too short": (["model", "tokenizer", None, "tenant"], "expected four names"),
    "block size 0": (["model", "tokenizer", "adapter", "tenant", 0, 0], "block size 0"),
    "block size text": (["model", "tokenizer", "adapter", "tenant", "16", 0], "block size '16'"),
    "block size as a float": (["model", "tokenizer", "adapter", "tenant", 16.0, 0], r"block size 16\.0"),
    "block size true": (["model", "tokenizer", "adapter", "tenant", True, 0], "block size True"),
    "block size beyond 20 bits": (
        ["model", "tokenizer", "adapter", "tenant", (1 << 20) + 1, 0],
        "expected 1 to 1048576",
    ),
    "block bytes beyond 32 bits": (
        ["model", "tokenizer", "adapter", "tenant", 16, 1 << 32],
        "expected 0 to 4294967295",
    ),
    "negative bytes": (["model", "tokenizer", "adapter", "tenant", 16, -1], "block bytes -1"),
    "empty model": (["", "tokenizer", "adapter", "tenant", 16, 0], "scope field model_id"),
    "no tenant": (["model", "tokenizer", "adapter", None, 16, 0], "scope field tenant_id"),
    "of another id": (["model", "tokenizer", None, "tenant", 16, 0], "does not match its scope"),
}


@pytest.mark.parametrize("name", SCOPE_ENTRIES)
def test_the_error_names_what_is_wrong_with_a_scope_entry(name: str) -> None:
    entry, text = SCOPE_ENTRIES[name]
    message = raw(STORED)
    message[SCOPES][ID] = entry
    with pytest.raises(WireError, match=text):
        decode(msgpack.packb(message))


@pytest.mark.parametrize("code", [3, 4])
def test_a_message_has_at_most_one_event_that_takes_a_holder(code: int) -> None:
    assert len(decode(msgpack.packb(raw([code], STORED))).events) == 2
    with pytest.raises(WireError, match=f"2 events with code {code}; expected at most one"):
        decode_raw(msgpack.packb(raw([code], STORED, [code])))


@pytest.mark.parametrize("event", [Checkpoint([0] * 14), SnapshotEnd(-1, DIGEST), Stored(ID, Tier.HBM, b"")])
def test_a_sender_can_not_encode_an_invalid_event(event: Any) -> None:
    with pytest.raises(WireError):
        to_raw(message_of(event))
