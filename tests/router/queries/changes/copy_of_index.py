"""A copy of the index, kept by the documented rules for changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Block = tuple[str, str | None, str, str]
"""(tenant, adapter, hash, tier); a mark has MARK for its tier"""
MARK = "mark"


@dataclass
class Worker:
    incarnation: int = 0
    held: set[Block] = field(default_factory=set)
    aside: set[Block] | None = None
    dropped: int | None = None

    def change(self, event: Mapping[str, Any]) -> None:
        target = self.held if self.aside is None else self.aside
        self.dropped = event.get("dropped", self.dropped)
        match event["kind"]:
            case "begin":
                self.aside = set()
            case "marked":
                target |= blocks_of(event)
            case "unmarked":
                target -= blocks_of(event)
            case "stored":
                target |= blocks_of(event)
            case "removed":
                target -= blocks_of(event)
            case "cleared":
                target.clear()
            case "end" if self.aside is not None:
                self.held, self.aside = self.aside, None
            case "gone":
                self.held, self.aside = set(), None


@dataclass
class CopyOfIndex:
    """`position`: the last change's, from which to continue."""

    workers: dict[str, Worker] = field(default_factory=dict)
    position: str = ""
    live: bool = False

    def take(self, kind: str, data: Mapping[str, Any], position: str) -> None:
        self.live = self.live or kind == "live"
        self.position = position or self.position
        if kind == "live":
            return
        worker = self.workers.setdefault(data["worker"], Worker())
        if data["incarnation"] < worker.incarnation:
            return
        worker.incarnation = data["incarnation"]
        if kind == "snapshot":
            if data["aside"] and worker.aside is None:
                worker.aside = set()
            target = worker.aside if data["aside"] else worker.held
            assert target is not None
            target |= blocks_of(data) if data.get("hashes") else set()
            target |= blocks_of({**data, "hashes": data["marked"]}) if "marked" in data else set()
            worker.dropped = data["dropped"]
        for event in data.get("events", ()):
            worker.change(event)

    def contents(self) -> dict[str, set[Block]]:
        """The blocks of each worker that holds any."""
        return {worker_id: worker.held for worker_id, worker in self.workers.items() if worker.held}


def blocks_of(event: Mapping[str, Any]) -> set[Block]:
    return {(event["tenant_id"], event["adapter_id"], one, event.get("tier", MARK)) for one in event["hashes"]}
