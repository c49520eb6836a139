"""Selects the workers that may get a request: by labels, by lists of ids, and by excluding single workers for a given
reason."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvatlas.fleet.records import EngineEndpoint


@dataclass(frozen=True, slots=True)
class Selector:
    """Selects workers that have all of `labels`, are on the `allow` list (if there is one), and are not on the `deny` list.
    `unfit`: other workers that can't serve the request, by id, with the reason for each."""

    labels: Mapping[str, str] = field(default_factory=dict)
    allow: Collection[str] | None = None
    deny: Collection[str] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, worker: EngineEndpoint) -> str | None:
        """Why a worker may not get the request, in a few words; None if it may."""
        if worker.id in self.deny:
            return "it is on the deny list"
        if (why := self.unfit.get(worker.id)) is not None:
            return why
        if self.allow is not None and worker.id not in self.allow:
            return "it is not on the allow list"
        for name, value in self.labels.items():
            if worker.labels.get(name) != value:
                has = f"is {worker.labels[name]}" if name in worker.labels else "is absent"
                return f"its label {name} {has}; expected {value}"
        return None
