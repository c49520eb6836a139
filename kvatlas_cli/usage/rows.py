"""Usage rows: the index's byte-seconds and the answers' tokens, joined by model, tenant, adapter and program."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope
from kvatlas.index.usage import ResidentUse
from kvatlas.predictions.usage_counts import AnswerUse, User
from kvatlas_cli.logs import printable

FORGOTTEN = "(forgotten)"
"""Shown in place of names that are no longer kept."""

_FORMULA = ("=", "+", "-", "@")
_OF_ANSWERS = (
    ("prompt_tokens", "Prompt tokens of answers that report cached ones", "prompt_tokens", 1),
    ("cached_tokens", "Prompt tokens that engines found cached", "cached_tokens", 1),
    ("saved_seconds", "Engine time that these would have taken, as priced", "saved_us", 1e-6),
)
"""Name, description, field of `AnswerUse`, and a factor."""


@dataclass(slots=True)
class UsageRow:
    """`scope=None`: the scope has been forgotten. `program`: empty for blocks, which programs share, and for requests
    that prove no program."""

    scope: Scope | None
    program: str
    byte_seconds: dict[Tier, float] = field(default_factory=dict)
    answers: AnswerUse = field(default_factory=AnswerUse)

    @property
    def names(self) -> dict[str, str]:
        scope = self.scope
        if scope is None:
            return dict.fromkeys(("model", "tenant", "adapter"), FORGOTTEN) | {"program": ""}
        return {
            "model": scope.model_id,
            "tenant": scope.tenant_id,
            "adapter": scope.adapter_id or "",
            "program": self.program,
        }

    def jsonable(self) -> dict[str, Any]:
        return {
            **self.names,
            "resident_byte_seconds": sum(self.byte_seconds.values()),
            **{f"{tier.label}_byte_seconds": self.byte_seconds.get(tier, 0.0) for tier in Tier},
            "answers": self.answers.answers,
            "prompt_tokens": self.answers.prompt_tokens,
            "cached_tokens": self.answers.cached_tokens,
            "saved_seconds": self.answers.saved_us / 1e6,
        }


def join_rows(resident: Iterable[ResidentUse], answers: Iterable[Mapping[User | None, AnswerUse]]) -> list[UsageRow]:
    """A row for each model, tenant, adapter and program, sorted in that order."""
    found: dict[tuple[str, ...], UsageRow] = {}

    def row_of(scope: Scope | None, program: str) -> UsageRow:
        row = UsageRow(scope, program)
        return found.setdefault(tuple(row.names.values()), row)

    for use in resident:
        row = row_of(use.scope, "")
        row.byte_seconds[use.tier] = row.byte_seconds.get(use.tier, 0.0) + use.byte_seconds
    for pool in answers:
        for user, used in pool.items():
            row = row_of(user.scope, user.program) if user is not None else row_of(None, "")
            row.answers = row.answers.plus(used)
    return [row for _, row in sorted(found.items())]


def to_csv(rows: Sequence[UsageRow]) -> str:
    """The rows as CSV, after a header line. Clients and engines chose the names: control characters are escaped, and a name
    that a spreadsheet would take for a formula is prefixed with an apostrophe."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(UsageRow(None, "").jsonable()), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        names = {field: "'" * name.startswith(_FORMULA) + printable(name) for field, name in row.names.items()}
        writer.writerow(row.jsonable() | names)
    return text.getvalue()


def to_prometheus(rows: Sequence[UsageRow]) -> str:
    """Sums by model and tier in Prometheus' text format, without the names of tenants, adapters or programs."""
    resident: dict[tuple[str, Tier], float] = {}
    answers: dict[str, AnswerUse] = {}
    for row in rows:
        model = row.names["model"]
        for tier, amount in row.byte_seconds.items():
            resident[model, tier] = resident.get((model, tier), 0.0) + amount
        answers[model] = answers.get(model, AnswerUse()).plus(row.answers)
    lines = _metric("resident_byte_seconds", "Bytes of blocks in workers' caches, times seconds")
    lines += [
        f'kvatlas_usage_resident_byte_seconds_total{{model="{_escape(model)}",tier="{tier.label}"}} {amount!r}'
        for (model, tier), amount in sorted(resident.items())
    ]
    for name, description, field_name, factor in _OF_ANSWERS:
        lines += _metric(name, description)
        for model, used in sorted(answers.items()):
            lines.append(
                f'kvatlas_usage_{name}_total{{model="{_escape(model)}"}} {getattr(used, field_name) * factor!r}'
            )
    return "\n".join([*lines, ""])


def _metric(name: str, description: str) -> list[str]:
    full = f"kvatlas_usage_{name}_total"
    return [f"# HELP {full} {description}", f"# TYPE {full} counter"]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
