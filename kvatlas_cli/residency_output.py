"""Prints residencies for commands: as JSON, or as rows of a table."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvatlas.block_lookup.fields import residency_fields
from kvatlas.blocks.external_chain import hash_text
from kvatlas.blocks.residency import Residency
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.store.connection import Store
from kvatlas_cli.output import age_text, count_text, print_json, print_table


class ResidencyPrinter:
    """`records`: all workers and shared stores of the fleet."""

    def __init__(self, records: Mapping[str, FleetRecord], now_us: int) -> None:
        self._records = records
        self._now_us = now_us

    @classmethod
    async def of_fleet(cls, store: Store) -> Self:
        """A printer with the current heartbeats. Raises Unreachable."""
        return cls(await FleetStore(store).all(), time.time_ns() // 1_000)

    def jsonable(self, residency: Residency) -> dict[str, Any]:
        """A residency as JSON types. `kind`: the kind of the engine, or `store`; `age_ms`: time since the worker's last
        heartbeat. Both are None for a worker that is not in the fleet."""
        age_us = self._age_us(residency.worker_id)
        return {
            "worker": residency.worker_id,
            "kind": self._kind(residency.worker_id),
            **residency_fields(residency),
            "age_ms": None if age_us is None else age_us // 1_000,
        }

    def print_all(self, what: str, scope: Scope, residencies: Sequence[Residency], *, as_json: bool) -> None:
        """Print the residencies as a JSON array, or as a table. `what`: describes the residencies in the title."""
        if as_json:
            print_json([self.jsonable(residency) for residency in residencies])
            return
        title = f"{count_text(len(residencies), 'residency', 'residencies')} {what} in {scope}"
        columns = ("worker", "kind", "tier", "sequence hash", "bytes", "flags", "heard")
        print_table(title, columns, [self._row(residency) for residency in residencies])

    def _row(self, residency: Residency) -> tuple[str, ...]:
        age_us = self._age_us(residency.worker_id)
        flags = [name for name in ("pinned", "resumable") if getattr(residency, name)]
        return (
            residency.worker_id,
            self._kind(residency.worker_id) or "-",
            residency.tier.label,
            hash_text(residency.sequence_hash),
            f"{residency.bytes:,}" if residency.bytes else "unknown",
            ", ".join(flags) or "-",
            "never" if age_us is None else f"{age_text(age_us)} ago",
        )

    def _age_us(self, worker_id: str) -> int | None:
        record = self._records.get(worker_id)
        return max(0, self._now_us - record.heard_us) if record is not None and record.heard_us else None

    def _kind(self, worker_id: str) -> str | None:
        record = self._records.get(worker_id)
        return None if record is None else record.endpoint.kind.value
