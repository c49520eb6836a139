"""Routers: their counts of predicted and reported cached tokens."""

from collections.abc import Iterator, Mapping

from kvatlas.predictions.accuracy import AnswerReport
from kvatlas_cli.doctor.report import Finding, Level


def judge_answers(pool: str, reports: Mapping[str, AnswerReport]) -> Iterator[Finding]:
    """`pool`: its name in a line; `reports`: by router."""
    for router_id, report in sorted(reports.items()):
        counts, found = report.counts, report.findings()
        where = f"router {router_id}, {pool}"
        for line, advice in found:
            yield Finding("routers.answers", Level.WARNING, f"{where}: {line}", advice)
        if not found:
            compared = counts.cached_equal + sum(counts.by_deviation.values())
            share = (
                f", {counts.cached_equal / compared:.1%} with the predicted number of cached tokens" if compared else ""
            )
            yield Finding("routers.answers", Level.OK, f"{where}: {compared:,} answers{share}")


def judge_progress(pool: str, reports: Mapping[str, AnswerReport]) -> Iterator[Finding]:
    """Workers whose engines make no progress though they have work."""
    finders: dict[str, list[str]] = {}
    for router_id, report in sorted(reports.items()):
        for worker_id in report.stalled:
            finders.setdefault(worker_id, []).append(router_id)
    for worker_id, routers in sorted(finders.items()):
        line = (
            f"{pool}: worker {worker_id} is stalled: its engine makes no progress though it has work, whatever its /health "
            f"says; it gets no requests from router {', '.join(routers)}"
        )
        advice = "see the engine's log and its GPU (nvidia-smi, dmesg), and restart it"
        yield Finding("routers.progress", Level.ERROR, line, advice)


def judge_tenants(pool: str, reports: Mapping[str, AnswerReport]) -> Iterator[Finding]:
    """Requests of tenants whose blocks the workers that got them can't have."""
    for router_id, report in sorted(reports.items()):
        for one in report.foreign_tenants:
            line = (
                f"router {router_id}, {pool}: {one.requests:,} requests of tenant {one.tenant_id} went to workers that publish "
                f"tenant {one.published_tenant_id} ({one.worker_id}): nothing of theirs can match"
            )
            advice = (
                f"set the publishers' --tenant-id {one.tenant_id} (or --salt-is-tenant, if cache salts are tenants), or the "
                f"router's --tenant-id {one.published_tenant_id}"
            )
            yield Finding("routers.tenants", Level.ERROR, line, advice)
