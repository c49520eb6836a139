"""Digests of an engine's last payloads, 16 bytes each: 64 feeds remember a million of them in 16 MiB."""

from collections.abc import Sequence

from xxhash import xxh3_128_digest

DIGEST_BYTES = 16


class PayloadDigests:
    """The digests of consecutive seqs, of which the last `most` are kept."""

    def __init__(self, most: int, first_seq: int = 0, digests: Sequence[bytes] = ()) -> None:
        """`digests`: initial digests, from `first_seq` on."""
        self._most_bytes = most * DIGEST_BYTES
        self._first_seq = first_seq
        self._packed = bytearray().join(digests)

    def __len__(self) -> int:
        return len(self._packed) // DIGEST_BYTES

    def add(self, seq: int, payload: bytes) -> None:
        """Add the payload of the next seq. The first one may have any seq."""
        packed = self._packed
        if not packed:
            self._first_seq = seq
        packed += xxh3_128_digest(payload)
        if len(packed) > self._most_bytes:
            del packed[:DIGEST_BYTES]
            self._first_seq += 1

    def get(self, seq: int) -> bytes | None:
        """The digest of this seq's payload; None if it is not remembered."""
        at = (seq - self._first_seq) * DIGEST_BYTES
        return bytes(self._packed[at : at + DIGEST_BYTES]) if 0 <= at < len(self._packed) else None

    def last(self, most: int) -> tuple[int, list[bytes]]:
        """(first seq, digests) of the last payloads, at most `most`."""
        first = self._first_seq + max(0, len(self) - most)
        at = (first - self._first_seq) * DIGEST_BYTES
        ends = range(at + DIGEST_BYTES, len(self._packed) + 1, DIGEST_BYTES)
        return first, [bytes(self._packed[end - DIGEST_BYTES : end]) for end in ends]

    def clear(self) -> None:
        self._packed.clear()
