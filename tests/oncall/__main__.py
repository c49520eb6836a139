"""`python -m tests.oncall [FAULT...]`: what doctor, alerts, pages and logs say about each fault after 10 s, after 30 s, and
after recovery.

A fleet of processes serves requests, and a real Prometheus evaluates the rules, with shortened times. Needs Debian's
`prometheus`. Exit code 0 if everything they say is right.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import anyio

from tests.alerts.__main__ import faster_rules, of_the_machine
from tests.end_to_end.prometheus import Prometheus
from tests.http_client import http_client
from tests.oncall.faults import FAULTS, Fault
from tests.oncall.fleet import Fleet, Said, running_fleet
from tests.oncall.servers import SERVER_FAULTS, bus_and_store

LOOKS_S = (10.0, 30.0)
"""At the last of these times everything has to be right; at the first one, nothing healthy may be blamed."""
CALM_S = 5.0
RECOVERS_S = 100.0
"""Counters have windows of a minute."""
ALERT_S = 60.0


async def firing(url: str) -> set[str]:
    async with http_client(timeout=5) as client:
        found = (await client.get(f"{url}/api/v1/alerts")).json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}


def judge(fault: Fault, said: Said, *, late: bool) -> list[str]:
    """The doctor's wrong statements. If not `late`, it may not know about the fault yet."""
    wrong = []
    if late:
        wrong = [] if fault.answer in said.answer else [f"doctor answers {said.answer!r}; expected {fault.answer!r}"]
        for check, text in fault.checks.items():
            if not any(text in line for line in said.findings.get(check, ())):
                wrong.append(f"doctor's {check}: {said.findings.get(check)}; expected {text!r}")
    more = said.blamed - fault.checks.keys() - fault.also
    return [*wrong, *(f"doctor's {check} blames what is well: {said.findings[check]}" for check in sorted(more))]


async def try_fault(name: str, fault: Fault, folder: Path) -> list[str]:
    """Everything that went wrong, one line each."""
    wrong: list[str] = []
    async with (
        bus_and_store() as (nats, store),
        running_fleet(folder, nats, store, fault.deadline_ms) as fleet,
        anyio.create_task_group() as group,
    ):
        group.start_soon(fleet.send_requests)
        with Prometheus(fleet.ports, folder, faster_rules(folder)) as prometheus:
            wrong += [f"before: {one}" for one in await until_green(fleet)]
            wrong += [f"before: {one}" for one in await lost_in_calm(fleet)]
            lost_before = fleet.failures.copy()
            async with fault.made(fleet):
                began_s = monotonic()
                for at_s in LOOKS_S:
                    await anyio.sleep(max(0.0, began_s + at_s - monotonic()))  # when a person looks
                    said = await fleet.ask_doctor()
                    wrong += [f"{at_s:g} s: {one}" for one in judge(fault, said, late=at_s == LOOKS_S[-1])]
                    print(f"  {at_s:g} s: {said.answer}")
                    for check, lines in said.findings.items():
                        print(f"    {check}: {lines[0][:160]}")
                if fault.alert:
                    with anyio.move_on_after(ALERT_S):
                        while fault.alert not in await firing(prometheus.url):
                            await anyio.sleep(0.5)  # between two looks
                alerts = await firing(prometheus.url)
                print(f"  alerts: {', '.join(sorted(alerts)) or 'none'}")
                if fault.alert and fault.alert not in alerts:
                    wrong.append(f"{fault.alert} does not fire")
                wrong += [
                    f"{one} fires" for one in sorted(alerts - fault.also_alerts - of_the_machine() - {fault.alert})
                ]
                pages = json.dumps([await fleet.page("router"), await fleet.page("indexer")])
                wrong += [] if fault.page in pages else [f"no page says {fault.page!r}"]
                wrong += [] if fault.log in fleet.log() else [f"no log says {fault.log!r}"]
                lost = fleet.failures - lost_before
                wrong += [] if fault.loses or not lost else [f"{lost.total()} requests lost: {dict(lost)}"]
            left = [*await until_green(fleet), *await lost_in_calm(fleet), *await still_firing(prometheus.url)]
            print(f"  after: {left or 'green'}; {lost.total()} requests lost, {fleet.answered} answered", flush=True)
            wrong += [f"after: {one}" for one in left]
        group.cancel_scope.cancel()
    return [f"{name}: {one}" for one in wrong]


async def lost_in_calm(fleet: Fleet) -> list[str]:
    """Requests that are lost within CALM_S."""
    answered, failures = fleet.answered, fleet.failures.copy()
    await anyio.sleep(CALM_S)  # traffic
    lost = fleet.failures - failures
    found = [f"{lost.total()} requests lost: {dict(lost)}"] if lost else []
    return found if fleet.answered > answered else [*found, "no request answered"]


async def still_firing(url: str) -> list[str]:
    """Alerts that don't end."""
    with anyio.move_on_after(ALERT_S):
        while await firing(url) - of_the_machine():
            await anyio.sleep(0.5)  # between two looks
    return [f"{one} still fires" for one in sorted(await firing(url) - of_the_machine())]


async def until_green(fleet: Fleet) -> list[str]:
    """Everything that is still wrong after RECOVERS_S."""
    deadline_s = monotonic() + RECOVERS_S
    while not (said := await fleet.ask_doctor()).green and monotonic() < deadline_s:
        await anyio.sleep(1.0)  # between two looks
    return [] if said.green else [said.answer, *(f"{check}: {lines}" for check, lines in said.findings.items())]


async def check(names: Sequence[str]) -> list[str]:
    wrong: list[str] = []
    for name in names or [*FAULTS, *SERVER_FAULTS]:
        print(name.replace("_", " "), flush=True)
        with tempfile.TemporaryDirectory(prefix="kvatlas-oncall-") as made:
            found = await (
                SERVER_FAULTS[name](Path(made)) if name in SERVER_FAULTS else try_fault(name, FAULTS[name], Path(made))
            )
        for line in found:
            print(f"  WRONG {line}", flush=True)
        wrong += found
    return wrong


def main() -> None:
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is missing: apt-get install prometheus")
    names = sys.argv[1:]
    known = {*FAULTS, *SERVER_FAULTS}
    if unknown := sorted(set(names) - known):
        sys.exit(f"no fault: {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")
    wrong = anyio.run(check, names)
    print(f"{len(names or known)} faults, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
