"""A worker's load, as its engine or a tool reports it in a batch in one of the open event forms (docs/events.md)."""

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, ValidationError

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import ForwardPassMetrics, WorkerState
from kvatlas.validation import describe_mistake

_STATE_FIELDS = frozenset(WorkerState.model_fields) - {
    "id",
    "locality_domain",
    "forward_pass",
    "sampled_us",
    "computed",
}
_METRIC_NAMES = frozenset(
    str(name)
    for field in ForwardPassMetrics.model_fields.values()
    if isinstance(field.validation_alias, AliasChoices)
    for name in field.validation_alias.choices
)


def read_load(told: Mapping[str, Any], worker_id: str, sampled_us: int, locality_domain: str = "") -> WorkerState:
    """Read a load as an engine reports it: fields of `ForwardPassMetrics`, under either name, next to fields of `WorkerState`.
    A whole state is accepted too: its `id` must then be the worker's, and its `locality_domain` counts if no other is given.

    Raises InvalidValue, naming the field, for a value out of bounds, for an unknown name, or for the state of a different
    worker.
    """
    told = dict(told)
    if (named := told.pop("id", worker_id)) != worker_id:
        raise InvalidValue(f"load field id is {named!r:.80}; expected {worker_id}")
    locality_domain = locality_domain or told.pop("locality_domain", "")
    told.pop("locality_domain", None)
    state = {name: value for name, value in told.items() if name in _STATE_FIELDS}
    metrics = {name: value for name, value in told.items() if name not in _STATE_FIELDS}
    try:
        forward = ForwardPassMetrics.model_validate(metrics, strict=True)
        return WorkerState.model_validate(
            {
                **state,
                "id": worker_id,
                "locality_domain": locality_domain,
                "forward_pass": forward,
                "sampled_us": sampled_us,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = f"load field {first['loc'][0] if first['loc'] else ''}"
        if first["type"] != "extra_forbidden":
            raise InvalidValue(describe_mistake(where, first)) from error
        known = ", ".join(sorted(_STATE_FIELDS | _METRIC_NAMES))
        raise InvalidValue(f"{where} is not known, or given by both of its names; expected {known}") from error
