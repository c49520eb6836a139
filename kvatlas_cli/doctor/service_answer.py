"""The first finding for each model: whether a request would be served well right now.

"Yes": an engine accepts it, and the index knows which engine has its prefix. "By load only": an engine accepts it, but the
index has no reliable knowledge of prefixes. "No": the router would refuse it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvatlas.fleet.records import EngineState, FleetRecord, Liveness, Role
from kvatlas_cli.doctor.finding import Finding, Level, join_names
from router_client.fleet_cache import presume_alive

CHECK = "serving"
SILENT, LOST = "no heartbeat", "lost (no heartbeat)"
"""Why a worker that was not heard from, or not for some seconds, is left out."""


def judge_serving(
    pools: Mapping[str, Sequence[FleetRecord]],
    *,
    unusable: Mapping[str, str],
    unindexed: Mapping[str, str],
    obstacles: Sequence[str] = (),
    slow: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """One finding per pool. `pools`: by displayed name. `unusable`: workers that get no requests or don't answer any,
    whatever their records say, with the reason. `unindexed`: workers whose blocks the index does not know reliably, with the
    reason. `obstacles`: what prevents the index from answering for any worker. `slow`: what prevents it from answering in
    time, by pool."""
    for name, records in pools.items():
        engines = {one.endpoint.id: one for one in records if not one.endpoint.is_store}
        presumed = {id for id, one in presume_alive(engines).items() if one is not engines[id]}
        reasons = {id: why for id, one in engines.items() if (why := unusable.get(id) or why_left_out(one))}
        reasons = {id: why for id, why in reasons.items() if id not in presumed or why not in (SILENT, LOST)}
        usable = [id for id in engines if id not in reasons]
        if lacking := _missing_kind([engines[id] for id in usable]):
            yield _finding(name, Level.ERROR, f"no, because no {lacking} can take it{_listed(reasons)}")
            continue
        blind = {id: unindexed[id] for id in usable if id in unindexed}
        causes = [*obstacles]
        if silent := presumed.intersection(usable):
            causes.append(f"no engine's heartbeat arrives: routers use those that were up ({join_names(silent)})")
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
    """The finding for a model that had workers within the last hour but has none now."""
    return _finding(name, Level.ERROR, f"no, because none of its workers is left ({join_names(worker_ids)})")


def judge_unknown(why: str, *, without_store: bool = False) -> Finding:
    """The finding if no model is known. `why`: the first cause. `without_store`: the cause is the store, but engines that are
    up have been heard, so routers that have already read the fleet choose by load."""
    answer = "By load only, and only by routers that already run" if without_store else "No"
    return Finding(
        CHECK, Level.ERROR, f"would a request be served well now? {answer}, because {why}", "see the findings below"
    )


def why_left_out(record: FleetRecord) -> str:
    """Why routers send nothing to a worker, according to its record; empty if they do send."""
    if record.liveness is Liveness.LOST:
        return LOST
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
