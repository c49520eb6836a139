"""The first question: would a request be served well right now, for each model?

"Yes": an engine takes it, and the index says which one has its prefix. "By load only": an engine takes it, but nothing reliable
is known of prefixes. "No": the router would refuse it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvatlas.fleet.records import EngineState, FleetRecord, Liveness, Role
from kvatlas_cli.doctor.report import Finding, Level, join_names

CHECK = "serving"


def judge_serving(
    pools: Mapping[str, Sequence[FleetRecord]],
    *,
    unusable: Mapping[str, str],
    unindexed: Mapping[str, str],
    obstacles: Sequence[str] = (),
    slow: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """One finding a pool (by its name in a line). `unusable`: workers that get no requests or answer none, whatever their
    records say, with why. `unindexed`: workers of whose blocks the index knows nothing reliable, with why. `obstacles`: what
    keeps the index from answering for any worker. `slow`: what keeps it from answering in time, by pool."""
    for name, records in pools.items():
        engines = {one.endpoint.id: one for one in records if not one.endpoint.is_store}
        reasons = {id: why for id, one in engines.items() if (why := unusable.get(id) or why_left_out(one))}
        usable = [id for id in engines if id not in reasons]
        if lacking := _missing_kind([engines[id] for id in usable]):
            yield _finding(name, Level.ERROR, f"no, because no {lacking} can take it{_listed(reasons)}")
            continue
        blind = {id: unindexed[id] for id in usable if id in unindexed}
        causes = [*obstacles]
        if (late := (slow or {}).get(name)) is not None:
            causes.append(late)
        if len(blind) == len(usable):
            causes.append(_joined(blind))
        if causes:
            yield _finding(name, Level.WARNING, f"by load only, because {'; '.join(dict.fromkeys(causes))}")
        elif reasons or blind:
            line = f"yes, by {len(usable)} of {len(engines)} engines{_listed({**reasons, **blind})}"
            yield _finding(name, Level.OK, line)
        else:
            yield _finding(name, Level.OK, f"yes, by {len(usable)} of {len(engines)} engines")


def judge_gone(name: str, worker_ids: Collection[str]) -> Finding:
    """A model of the last hour without any worker now."""
    return _finding(name, Level.ERROR, f"no, because none of its workers is there any more ({join_names(worker_ids)})")


def judge_unknown(why: str) -> Finding:
    """No model is known. `why`: the one cause that comes first."""
    return Finding(
        CHECK, Level.ERROR, f"would a request be served well now? No, because {why}", "see the findings below"
    )


def why_left_out(record: FleetRecord) -> str:
    """Why routers send nothing to a worker, by its record; empty if they do."""
    if record.liveness is Liveness.LOST:
        return "lost (no heartbeat)"
    return "" if record.state is EngineState.UP else record.state.value


def _missing_kind(usable: Collection[FleetRecord]) -> str:
    """The kind of worker that is missing for a whole request; empty if none is."""
    roles = {one.endpoint.role for one in usable}
    if not roles:
        return "engine"
    if Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles:
        return ""
    return f"{(Role.DECODE if Role.PREFILL in roles else Role.PREFILL).value} worker"


def _finding(name: str, level: Level, line: str) -> Finding:
    advice = "see the findings below" if level is not Level.OK else ""
    return Finding(CHECK, level, f"{name}: would a request be served well now? {line[0].upper()}{line[1:]}", advice)


def _listed(reasons: Mapping[str, str]) -> str:
    return f" ({_joined(reasons)})" if reasons else ""


def _joined(reasons: Mapping[str, str]) -> str:
    """ "w1, w2: draining; w3: down"."""
    workers: dict[str, list[str]] = {}
    for id, why in reasons.items():
        workers.setdefault(why, []).append(id)
    return "; ".join(f"{join_names(ids)}: {why}" for why, ids in sorted(workers.items()))
