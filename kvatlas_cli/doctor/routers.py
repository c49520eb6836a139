"""Routers: their counts of predicted and reported cached tokens, and their condition."""

from collections.abc import Iterator, Mapping

from kvatlas.predictions.accuracy import AnswerReport
from kvatlas.predictions.condition import RouterCondition
from kvatlas.predictions.store import StoredReport
from kvatlas.runtime.descriptors import FEW
from kvatlas_cli.doctor.finding import Finding, Level
from kvatlas_cli.output import count_text

LATE_REPORT_US = 10_000_000
FEW_LEFT = 0.8
"""From this share of open descriptors on, a router is about to run out."""
MANY = 0.05
"""From this share on, refused requests, clients that gave up, and late answers from the store are findings."""
MOST_CHOICES = 0.5
"""From this share on, most choices are made without the index."""


def judge_answers(pool: str, reports: Mapping[str, AnswerReport]) -> Iterator[Finding]:
    """Judge a pool's answers. `pool`: its displayed name. `reports`: by router."""
    for router_id, report in sorted(reports.items()):
        counts, found = report.recent or report.counts, report.findings()
        where = f"router {router_id}, {pool}"
        for line, advice in found:
            yield Finding("routers.answers", Level.WARNING, f"{where}: {line}", advice)
        if not found:
            compared = counts.cached_equal + sum(counts.by_deviation.values())
            share = (
                f", {counts.cached_equal / compared:.1%} with the predicted number of cached tokens" if compared else ""
            )
            yield Finding("routers.answers", Level.OK, f"{where}: {compared:,} answers in the last minute{share}")


def judge_progress(pool: str, reports: Mapping[str, AnswerReport]) -> Iterator[Finding]:
    """Find workers whose engines have work but make no progress."""
    finders: dict[str, list[str]] = {}
    for router_id, report in sorted(reports.items()):
        for worker_id in report.stalled:
            finders.setdefault(worker_id, []).append(router_id)
    for worker_id, routers in sorted(finders.items()):
        line = (
            f"{pool}: worker {worker_id} is stalled: its engine has work but makes no progress, whatever its /health says; it "
            f"gets no requests from router {', '.join(routers)}"
        )
        advice = "check the engine's log and its GPU (nvidia-smi, dmesg), and restart it"
        yield Finding("routers.progress", Level.ERROR, line, advice)


def judge_tenants(pool: str, reports: Mapping[str, AnswerReport]) -> Iterator[Finding]:
    """Find requests that went to workers that can't have their tenants' blocks."""
    for router_id, report in sorted(reports.items()):
        for one in report.foreign_tenants:
            line = (
                f"router {router_id}, {pool}: {one.requests:,} requests of tenant {one.tenant_id} went to workers that publish "
                f"tenant {one.published_tenant_id} ({one.worker_id}): none of their blocks can match"
            )
            advice = (
                f"set the publishers' --tenant-id {one.tenant_id} (or --salt-is-tenant, if cache salts are tenants), or the "
                f"router's --tenant-id {one.published_tenant_id}"
            )
            yield Finding("routers.tenants", Level.ERROR, line, advice)


def conditions_of(reports: Mapping[str, StoredReport]) -> dict[str, RouterCondition]:
    return {id: one.report.condition for id, one in reports.items() if one.report.condition is not None}


def router_clocks(reports: Mapping[str, StoredReport], store_ahead_us: int) -> dict[str, int]:
    """How far each router's clock is ahead of ours. `store_ahead_us`: the same for the store, whose clock dates the reports.
    Leaves out clocks that may be right: a report from a busy router arrives seconds late, as if the router's clock were
    behind."""
    ahead = {id: one.sent_us - reports[id].written_us + store_ahead_us for id, one in conditions_of(reports).items()}
    return {id: us for id, us in ahead.items() if not -LATE_REPORT_US < us < 0}


def describe_slow_store(conditions: Mapping[str, RouterCondition]) -> str | None:
    """Why most choices of these routers are made without the index; None if most are made with it."""
    choices = sum(one.choices for one in conditions.values())
    open_ones = sum(one.without_index for one in conditions.values())
    if choices and open_ones >= MOST_CHOICES * choices:
        return f"the store answers routers too late ({open_ones:,} of {choices:,} choices of the last minute)"
    return None


def judge_conditions(conditions: Mapping[str, RouterCondition]) -> Iterator[Finding]:
    """Judge the condition of routers. `conditions`: by router. Counts cover the last minute."""
    for router_id, one in sorted(conditions.items()):
        where = f"router {router_id}"
        yield from _judge_descriptors(where, one)
        yield from _judge_proof(where, one)
        if one.store_is_far:
            yield _describe_distance(where, one)
        if one.choices and one.fell_open >= MANY * one.choices:
            line = (
                f"{where}: {one.fell_open:,} of {one.choices:,} choices of the last minute were made without the store"
            )
            advice = "see store.distance and the store's load (SLOWLOG GET); a router's copy of the index (--replica) asks less"
            yield Finding("routers.store", Level.WARNING, line, advice)
        # a server may try each request several times; a library counts only its attempts
        if lost := one.refused if one.requests else one.no_workers:
            share = lost / max(1, one.requests)
            line = f"{where}: no engine took {count_text(lost, 'request')} of the last minute"
            level = Level.ERROR if share >= MANY else Level.WARNING
            yield Finding("routers.refused", level, line, "see `serving`, engines' logs and their load")
        if one.requests and one.gone >= MANY * one.requests:
            line = f"{where}: {one.gone:,} of {one.requests:,} clients of the last minute gave up before the end"
            yield Finding("routers.gone", Level.WARNING, line, "are answers slower than the clients' time limit?")


def _judge_proof(where: str, one: RouterCondition) -> Iterator[Finding]:
    if one.proves_tenants is None:
        return
    if one.limits_shared is False:
        line = f"{where}: clients' limits per minute are not shared through the store: each router counts alone"
        advice = "see routers.store and the router's log; after an upgrade, run kvatlas auth redis again"
        yield Finding("routers.limits", Level.WARNING, line, advice)
    if one.proves_tenants:
        yield Finding("routers.proof", Level.OK, f"{where}: each request proves its tenant")
        return
    line = f"{where}: every client that reaches it belongs to the tenant of --tenant-id, whatever it sends"
    advice = "for several tenants, or limits by key: --clients-file (router), --tenant-from (epp)"
    yield Finding("routers.proof", Level.INFO, line, advice)


def _describe_distance(where: str, one: RouterCondition) -> Finding:
    away_ms, waited = one.store_us / 1e3, one.choices - one.without_index
    line = (
        f"{where} is {away_ms:.0f} ms away from the store: a choice waits only for the index, and is booked afterwards"
    )
    if one.without_index:
        line += f"; {one.without_index:,} of {one.choices:,} choices of the last minute did without the index"
    line += f"; {waited:,} had its answer. Routers see each other's bookings {away_ms:.0f} ms late"
    advice = "run the store beside the routers; with a copy of the index (--replica) a choice waits for nothing"
    return Finding("routers.distance", Level.WARNING, line, advice)


def _judge_descriptors(where: str, one: RouterCondition) -> Iterator[Finding]:
    check, most = "routers.descriptors", one.most_descriptors
    advice = "raise its limit (ulimit -n, LimitNOFILE=, --ulimit nofile=): each request needs two"
    if not most:
        return
    line = f"{where} has {one.descriptors:,} of at most {most:,} file descriptors open"
    if one.descriptors >= FEW_LEFT * most:
        yield Finding(check, Level.ERROR, f"{line}: it refuses connections when none are left", advice)
    elif most < FEW:
        yield Finding(check, Level.ERROR, f"{line}: too few for a router under load", advice)
    else:
        yield Finding(check, Level.OK, line)
