"""Which messages of a partition may reach the index: well formed, and of the worker whose subject they came on."""

from enum import StrEnum

import msgpack

from kvatlas.bus.subjects import worker_of
from kvatlas.bus.wire import MAX_MESSAGE_BYTES, VERSION, RawMessage, decode_raw, scope_use
from kvatlas.errors import InvalidValue, KvatlasError, WireError
from kvatlas.identity import partition_of


class Poison(StrEnum):
    """Why a message is not applied; each has a counter `poison_<reason>`."""

    MALFORMED = "malformed"
    VERSION = "version"
    OVERSIZED = "oversized"
    SCOPE = "scope"
    WRONG_SUBJECT = "wrong_subject"
    WRONG_PARTITION = "wrong_partition"


class Refused(KvatlasError):
    """A message must not be applied: `reason`, and one line for the log."""

    def __init__(self, reason: Poison, line: str) -> None:
        super().__init__(line)
        self.reason = reason


REMEMBERED = 10_000
"""Workers, and scopes, that were checked; more were checked again."""


class Admission:
    """Decodes and checks messages of one partition. Work is per message and event, never per block."""

    def __init__(self, partition: int, partitions: int) -> None:
        self.partition = partition
        self._partitions = partitions
        self._worker_of_subject: dict[str, str] = {}
        self._scopes: dict[bytes, list[object]] = {}

    def admit(self, subject: str, payload: bytes) -> RawMessage:
        """The checked message. Raises Refused."""
        try:
            raw = decode_raw(payload)
        except WireError as error:
            raise Refused(_reason(payload), str(error)) from error
        worker_id: str = raw[1]
        if self._worker_of_subject.get(subject) != worker_id:
            self._check_worker(subject, worker_id)
        for scope_id, entry in raw[5].items():
            if self._scopes.get(scope_id) != entry:
                self._check_scope(scope_id, entry)
        return raw

    def _check_worker(self, subject: str, worker_id: str) -> None:
        try:
            partition, named = worker_of(subject)
        except InvalidValue as error:
            raise Refused(Poison.WRONG_SUBJECT, str(error)) from error
        if named != worker_id:
            raise Refused(Poison.WRONG_SUBJECT, f"message of worker {worker_id} on the subject of {named}")
        right = partition_of(worker_id, self._partitions)
        if partition != right or partition != self.partition:
            line = f"message of worker {worker_id} in partition {partition}; expected {right} of {self._partitions}"
            raise Refused(Poison.WRONG_PARTITION, line)
        if len(self._worker_of_subject) >= REMEMBERED:
            self._worker_of_subject.clear()
        self._worker_of_subject[subject] = worker_id

    def _check_scope(self, scope_id: object, entry: list[object]) -> None:
        try:
            scope_use(scope_id, entry)
        except WireError as error:
            raise Refused(Poison.SCOPE, str(error)) from error
        assert isinstance(scope_id, bytes)  # scope_use compared it with the id of the fields
        if len(self._scopes) >= REMEMBERED:
            self._scopes.clear()
        self._scopes[scope_id] = entry


def _reason(payload: bytes) -> Poison:
    """Why `decode_raw` refused these bytes."""
    if len(payload) > MAX_MESSAGE_BYTES:
        return Poison.OVERSIZED
    try:
        raw = msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return Poison.MALFORMED
    if isinstance(raw, list) and raw and type(raw[0]) is int and raw[0] != VERSION:
        return Poison.VERSION
    return Poison.MALFORMED
