"""Routers: what they count of answers."""

from collections.abc import Iterator, Mapping

from kvatlas.predictions.accuracy import AnswerReport
from kvatlas_cli.doctor.finding import Finding, Level


def judge_answers(pool: str, reports: Mapping[str, AnswerReport]) -> Iterator[Finding]:
    """`pool`: how it is called in a line; reports by router."""
    for router_id, report in sorted(reports.items()):
        counts, found = report.counts, report.findings()
        where = f"router {router_id}, {pool}"
        for line, advice in found:
            yield Finding("routers.answers", Level.WARNING, f"{where}: {line}", advice)
        if not found:
            told = counts.cached_equal + sum(counts.by_deviation.values())
            share = (
                f", {counts.cached_equal / told:.1%} of them with the cached tokens that were predicted" if told else ""
            )
            yield Finding("routers.answers", Level.OK, f"{where}: {told:,} answers{share}")
