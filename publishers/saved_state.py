"""The state that a publisher keeps across restarts: the ledger, the position in the engine's feed, and the last incarnation.

It is one file with a checksum, replaced as a whole (new file written, synced, renamed, folder synced). If the file is missing,
torn, from another version or for another worker, the publisher starts empty; this is not an error.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self

import msgpack

from kvatlas.bus.wire import MAX_INCARNATION
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas_publishers.counters import PublisherCounters

_MAGIC = b"kvatlas-publisher-state\x01"
_CHECKSUM_BYTES = 16

log = logging.getLogger("kvatlas.publisher")


@dataclass(frozen=True, slots=True)
class SavedState:
    """`ledger` and `continuity` are the results of their `dump`; `incarnation` is the last one published. `started_us`: start
    time of the engine's process in microseconds since 1970, 0 if unknown. `weight_version` (empty if unknown) and
    `adapter_roots`: as the engine last reported them."""

    worker_id: str
    incarnation: int
    continuity: bytes
    ledger: bytes
    started_us: int = 0
    weight_version: str = ""
    adapter_roots: Mapping[str, str] = field(default_factory=dict)


class StateFile:
    """The saved state of one worker. `warnings`: number of loads that found nothing usable; `warning`: the reason for the last
    of these."""

    def __init__(self, state_dir: Path, worker_id: str) -> None:
        self.path = state_dir / f"{worker_id}.state"
        self._worker_id = worker_id
        self.warnings = 0
        self.warning = ""

    @classmethod
    def of(cls, folder: Path | None, worker_id: str) -> Self | None:
        """The file in this folder; None if no folder is given. Raises SettingsError if the folder can't be created or
        written."""
        if folder is None:
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            line = f"--state-dir (or KVATLAS_STATE_DIR): can't write to {folder}: {error.strerror}"
            raise SettingsError(f"{line}; expected a folder for the saved ledger") from error
        return cls(folder, worker_id)

    def try_save(self, state: SavedState, counters: PublisherCounters) -> bool:
        """Call `save`, and count the outcome. An error is only logged, because publishing continues."""
        try:
            self.save(state)
        except OSError as error:
            counters.saves_failed += 1
            log.warning("worker %s: state was not saved to %s: %s", self._worker_id, self.path, error.strerror)
            return False
        counters.saves += 1
        return True

    def save(self, state: SavedState) -> None:
        """Replace the file. After a crash at any point, it holds either the old or the new state. Raises OSError."""
        model = [state.weight_version, dict(state.adapter_roots)]
        body = msgpack.packb(
            [state.worker_id, state.incarnation, state.continuity, state.ledger, state.started_us, *model]
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".state.new")
        with beside.open("wb") as file:
            file.write(_MAGIC)
            file.write(_checksum(body))
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> bool:
        """Delete the file. Returns True if there was one. Raises OSError."""
        there = self.path.exists()
        self.path.unlink(missing_ok=True)
        return there

    def load(self) -> SavedState | None:
        """The last saved state; None, with one counted warning, if none is usable."""
        try:
            return self._unpack(self.path.read_bytes())
        except FileNotFoundError:
            self.warning = f"no saved state at {self.path}; starting empty"
        except (OSError, InvalidValue) as error:
            self.warning = f"saved state at {self.path} can't be used ({error}); starting empty"
        self.warnings += 1
        return None

    def _unpack(self, content: bytes) -> SavedState:
        if not content.startswith(_MAGIC):
            raise InvalidValue("not a publisher's state, or one of another version")
        at = len(_MAGIC) + _CHECKSUM_BYTES
        body = content[at:]
        if _checksum(body) != content[len(_MAGIC) : at]:
            raise InvalidValue("wrong checksum: it was torn or changed")
        try:
            worker_id, incarnation, continuity, ledger, started_us, weight_version, adapter_roots = msgpack.unpackb(
                body
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidValue(f"content is not a state: {error}") from error
        if worker_id != self._worker_id:
            raise InvalidValue(f"saved for worker {worker_id!r}; expected {self._worker_id!r}")
        if type(incarnation) is not int or not 0 <= incarnation <= MAX_INCARNATION or type(started_us) is not int:
            raise InvalidValue(f"incarnation {incarnation!r:.40}, start {started_us!r:.40}; expected integers")
        if not isinstance(continuity, bytes) or not isinstance(ledger, bytes):
            raise InvalidValue("ledger or position is not bytes")
        if not isinstance(weight_version, str) or not isinstance(adapter_roots, dict):
            raise InvalidValue("the weights' version is not text, or the adapters' roots are not a map")
        return SavedState(worker_id, incarnation, continuity, ledger, started_us, weight_version, adapter_roots)


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
