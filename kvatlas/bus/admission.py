"""Decides which messages of the stream may be applied: well-formed ones that arrive on the subject of the worker that they
name."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from time import time_ns
from typing import Any

from kvatlas.bus.subjects import FLEET, partition_of, worker_of
from kvatlas.bus.wire import (
    BLOCK_SIZE,
    INCARNATION,
    LAST_CODE,
    MAX_MESSAGE_BYTES,
    MESSAGE_VERSION,
    SCOPES,
    WORKER_ID,
    RawMessage,
    decode_raw,
    scope_use,
)
from kvatlas.errors import InvalidValue, KvatlasError, WireError
from kvatlas.fleet.identities import Identities
from kvatlas.identity import Scope
from kvatlas.incarnation import check_incarnation
from kvatlas.msgpack_input import unpack


class PoisonReason(StrEnum):
    """Why a message must not be applied; each has a counter `poison_<reason>`."""

    MALFORMED = "malformed"
    VERSION = "version"
    OVERSIZED = "oversized"
    SCOPE = "scope"
    INCARNATION = "incarnation"
    REFUSED = "refused"
    WRONG_SUBJECT = "wrong_subject"
    WRONG_PARTITION = "wrong_partition"
    IDENTITY = "identity"
    FLEET = "fleet"


class PoisonMessage(KvatlasError):
    """A message that must not be applied: its `reason`, and a line for the log."""

    def __init__(self, reason: PoisonReason, line: str) -> None:
        super().__init__(line)
        self.reason = reason


CHECKS_REMEMBERED = 10_000
"""Maximum number of checked subjects, and of checked scopes, that are remembered. Above this number, all of them are forgotten
and checked again."""


class Admission:
    """Decodes and checks the messages of one partition, or of all partitions (None). The work is per message and event, never
    per block."""

    def __init__(
        self,
        partition: int | None,
        partitions: int,
        identities: Identities | None = None,
        publishers: Sequence[int] = (),
        fleet_id: str | None = None,
    ) -> None:
        """`identities`: which scopes each worker's publisher may speak for; None: all. `publishers`: other partition counts
        that publishers may use. If there are any, messages of other partitions' workers arrive too. `fleet_id`: the fleet that
        the index belongs to; None: unknown, so the messages of all fleets are admitted."""
        self.partition = partition
        self._partitions = partitions
        self._publishers = publishers
        self._others: set[str] = set()
        """Subjects of other partitions' workers."""
        self._identities = identities
        self._fleet_id = fleet_id
        self._allowed: set[tuple[str, bytes]] = set()
        self._worker_of_subject: dict[str, str] = {}
        self._scopes: dict[bytes, list[object]] = {}

    def admit(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> RawMessage | None:
        """Return the checked message, or None if it belongs to another partition. Raises PoisonMessage."""
        if self._publishers and self.partition is not None and self._is_of_another(subject):
            return None
        if headers and self._fleet_id is not None and headers.get(FLEET, self._fleet_id) != self._fleet_id:
            line = f"its publisher is of fleet {headers[FLEET]:.12}, this is fleet {self._fleet_id}"
            raise PoisonMessage(PoisonReason.FLEET, f"{line}; give each fleet its own NATS (or account)")
        try:
            raw = decode_raw(payload)
        except WireError as error:
            raise PoisonMessage(_reason(payload), str(error)) from error
        try:
            check_incarnation(raw[INCARNATION], time_ns() // 1_000)
        except InvalidValue as error:
            raise PoisonMessage(PoisonReason.INCARNATION, str(error)) from error
        worker_id: str = raw[WORKER_ID]
        if self._worker_of_subject.get(subject) != worker_id:
            self._check_worker(subject, worker_id)
        for scope_id, entry in raw[SCOPES].items():
            if self._scopes.get(scope_id) != entry:
                self._check_scope(scope_id, entry)
            if self._identities is not None and (worker_id, scope_id) not in self._allowed:
                self._check_identity(self._identities, worker_id, scope_id, entry)
        return raw

    def _is_of_another(self, subject: str) -> bool:
        if subject in self._worker_of_subject:
            return False
        if subject not in self._others:
            if partition_of(subject.rpartition(".")[2], self._partitions) == self.partition:
                return False
            if len(self._others) >= CHECKS_REMEMBERED:
                self._others.clear()
            self._others.add(subject)
        return True

    def _check_worker(self, subject: str, worker_id: str) -> None:
        try:
            partition, named = worker_of(subject)
        except InvalidValue as error:
            raise PoisonMessage(PoisonReason.WRONG_SUBJECT, str(error)) from error
        if named != worker_id:
            raise PoisonMessage(PoisonReason.WRONG_SUBJECT, f"message of worker {worker_id} on the subject of {named}")
        right = partition_of(worker_id, self._partitions)
        allowed = {right, *(partition_of(worker_id, count) for count in self._publishers)}
        if partition not in allowed or self.partition not in (None, right):
            line = f"message of worker {worker_id} in partition {partition}; expected {right} of {self._partitions}"
            raise PoisonMessage(PoisonReason.WRONG_PARTITION, line)
        if len(self._worker_of_subject) >= CHECKS_REMEMBERED:
            self._worker_of_subject.clear()
        self._worker_of_subject[subject] = worker_id

    def _check_scope(self, scope_id: object, entry: list[object]) -> None:
        try:
            scope_use(scope_id, entry)
        except WireError as error:
            raise PoisonMessage(PoisonReason.SCOPE, str(error)) from error
        assert isinstance(scope_id, bytes)  # scope_use compared it with the id of the fields
        if len(self._scopes) >= CHECKS_REMEMBERED:
            self._scopes.clear()
        self._scopes[scope_id] = entry

    def _check_identity(self, identities: Identities, worker_id: str, scope_id: bytes, entry: list[Any]) -> None:
        model_id, tokenizer_id, adapter_id, tenant_id = entry[:BLOCK_SIZE]
        try:
            identities.check_scope(worker_id, Scope(model_id, tokenizer_id, adapter_id, tenant_id))
        except InvalidValue as error:
            raise PoisonMessage(PoisonReason.IDENTITY, str(error)) from error
        if len(self._allowed) >= CHECKS_REMEMBERED:
            self._allowed.clear()
        self._allowed.add((worker_id, scope_id))


def _reason(payload: bytes) -> PoisonReason:
    """Why `decode_raw` refused these bytes."""
    if len(payload) > MAX_MESSAGE_BYTES:
        return PoisonReason.OVERSIZED
    try:
        raw = unpack(payload, max_bytes=MAX_MESSAGE_BYTES, strict_map_key=False)
    except InvalidValue:
        return PoisonReason.MALFORMED
    if isinstance(raw, list) and raw and type(raw[MESSAGE_VERSION]) is int and raw[MESSAGE_VERSION] not in LAST_CODE:
        return PoisonReason.VERSION
    return PoisonReason.MALFORMED
