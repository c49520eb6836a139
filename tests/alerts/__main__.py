"""`python -m tests.alerts [CAUSE...]`: alerts on running processes, with all times in the rules shortened. Takes about fifteen
minutes.

A fleet serves requests while a real Prometheus scrapes it. In a healthy hour no alert fires. Then each cause is created in
turn; its alerts must fire, and end when the cause does. Needs Debian's `prometheus`. Exit code 0 if all of this happens.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import monotonic

import anyio

from tests.alerts.causes import CAUSES
from tests.alerts.fleet import running_fleet, send_picks, send_requests
from tests.deployment.test_alerts import ALERTS, FILE
from tests.end_to_end.prometheus import Prometheus
from tests.eventually import until
from tests.http_client import http_client

SPEED = 30
"""A minute in the rules takes 2 s here."""
HEALTHY_S = 3_600 / SPEED
FIRES_S = 90.0
ENDS_S = 180.0
"""An alert's window of hours takes two minutes."""
EVALUATION_S = 1.0
"""Interval at which Prometheus evaluates all rules."""
OF_A_SLOW_MACHINE = frozenset(
    {
        "KvatlasDecisionsSlow",
        "KvatlasDecisionsWithoutIndex",
        "KvatlasIndexLate",
        "KvatlasPredictionsWrong",
        "KvatlasTokenIdsMissing",
    }
)
"""Alerts about times. On a shared machine, they fire in a healthy fleet too."""
_UNITS = {"s": 1, "m": 60, "h": 3_600}


def is_busy() -> bool:
    """True if more programs want to run than there are processors."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))


def of_the_machine() -> frozenset[str]:
    """The alerts that other programs may cause now."""
    return OF_A_SLOW_MACHINE if is_busy() else frozenset()


def faster_rules(folder: Path) -> Path:
    """The rules with every duration divided by SPEED, but long enough for the four scrapes that a rate needs."""

    def shorten(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _UNITS[found[3]] / SPEED
        return f"{found[1]}{max(4 if found[1] == '[' else 1, round(seconds))}s"

    text = re.sub(r"(\[)(\d+)([smh])(?=\])", shorten, FILE.read_text())
    rules = folder / "rules.yaml"
    rules.write_text(re.sub(r"(for: )(\d+)([smh])\b", shorten, text))
    return rules


class Watch:
    """The alerts that fire."""

    def __init__(self, url: str) -> None:
        self._client = http_client(base_url=url)

    async def firing(self) -> set[str]:
        answer = await self._client.get("/api/v1/alerts")
        alerts = answer.json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    async def looks(self, seconds: float) -> AsyncIterator[set[str]]:
        """The firing alerts, once per evaluation of the rules, for this many seconds."""
        until_s = monotonic() + seconds
        while monotonic() < until_s:
            yield await self.firing()
            await anyio.sleep(EVALUATION_S)

    async def counts(self, query: str) -> bool:
        """True if the query has a result."""
        answer = await self._client.get("/api/v1/query", params={"query": query})
        return bool(answer.json()["data"]["result"])


async def healthy_hour(watch: Watch) -> set[str]:
    """The alerts that fired in it. It begins once all parts have been scraped and every partition has an owner: startup takes
    seconds, which are minutes in the faster rules."""
    seen: set[str] = set()

    async def is_healthy() -> bool:
        is_owned = await watch.counts("sum(kvatlas_indexer_partitions_owned) == 64")
        return is_owned and not await watch.firing() - OF_A_SLOW_MACHINE

    await until(is_healthy, deadline_s=ENDS_S, what="every partition has its owner, and no alert fires")
    async for firing in watch.looks(HEALTHY_S):
        seen |= firing - OF_A_SLOW_MACHINE
    return seen


async def check(names: Sequence[str]) -> tuple[set[str], list[str]]:
    """The alerts that were provoked, and what went wrong, one line each. `names`: the causes; if empty, a healthy hour and all
    causes."""
    wrong: list[str] = []
    provoked: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="kvatlas-alerts-") as made:
        folder = Path(made)
        async with running_fleet(folder) as fleet, anyio.create_task_group() as group:
            group.start_soon(send_requests, fleet)
            group.start_soon(send_picks, fleet)
            with Prometheus(fleet.ports, folder, faster_rules(folder)) as prometheus:
                watch = Watch(prometheus.url)
                if not names:
                    seen = await healthy_hour(watch)
                    print(f"a healthy hour in {HEALTHY_S:g} s: {', '.join(sorted(seen)) or 'no alert'}", flush=True)
                    wrong += [f"{one} fired in a healthy hour" for one in sorted(seen)]
                for name in names or CAUSES:
                    cause, alerts = CAUSES[name]
                    fired, found = await provoke(name.replace("_", " "), cause(fleet), alerts, watch)
                    provoked |= fired
                    wrong += found
            group.cancel_scope.cancel()
    return provoked, wrong


async def provoke(
    name: str, cause: AbstractAsyncContextManager[None], alerts: set[str], watch: Watch
) -> tuple[set[str], list[str]]:
    """Create the cause, and wait until its alerts fire, and until they end. Alerts that still fire because of an earlier cause
    would prove nothing, so their end is awaited first. Alerts that a busy machine causes are not judged."""
    before = await remaining(alerts, watch)
    unjudged = before & of_the_machine()
    wrong = [f"{name}: {alert} fires already" for alert in sorted(before - unjudged)]
    began = monotonic()
    async with cause:
        missing = alerts - unjudged
        async for firing in watch.looks(FIRES_S):
            missing -= firing
            if not missing:
                break
        fired_s = monotonic() - began
    wrong += [f"{name}: {alert} did not fire in {FIRES_S:g} s" for alert in sorted(missing)]
    ended = monotonic()
    left = await remaining(alerts - unjudged, watch)
    wrong += [f"{name}: {alert} still fires {ENDS_S:g} s after its cause" for alert in sorted(left - of_the_machine())]
    verdict = "; ".join(wrong) or f"after {fired_s:.0f} s, over {monotonic() - ended:.0f} s later"
    if unjudged:
        verdict += f"; not judged on a busy machine: {', '.join(sorted(unjudged))}"
    print(f"{name}: {', '.join(sorted(alerts))}: {verdict}", flush=True)
    return alerts - unjudged - missing, wrong


async def remaining(alerts: set[str], watch: Watch) -> set[str]:
    """Which of these alerts don't end within ENDS_S."""
    left = alerts
    async for firing in watch.looks(ENDS_S):
        left = alerts & firing
        if not left:
            break
    return left


def main() -> None:
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is missing: apt-get install prometheus")
    names = sys.argv[1:]
    if unknown := sorted(set(names) - CAUSES.keys()):
        sys.exit(f"no cause: {', '.join(unknown)}; expected some of {', '.join(CAUSES)}")
    provoked, wrong = anyio.run(check, names)
    print(f"{len(provoked)} of {len(ALERTS)} alerts provoked on running processes")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
