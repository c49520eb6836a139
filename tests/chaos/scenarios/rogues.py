"""A hostile publisher with its own credentials."""

import random

import anyio

from tests.chaos.credentials import ROGUE
from tests.chaos.rogue import rogue_publisher
from tests.chaos.scenario_run import ScenarioRun
from tests.eventually import until

LEAST_ROUNDS = 20


async def rogue_publisher_attacks(run: ScenarioRun) -> None:
    """It speaks for others, floods and sends extreme values; meanwhile the whole index is lost, and every engine's publisher
    needs a grant or a snapshot. The index becomes exact while the attack continues."""
    fleet = run.fleet
    await run.wait_for_answers(10)
    async with rogue_publisher(fleet, random.Random(run.name)) as rogue, anyio.create_task_group() as tasks:
        tasks.start_soon(rogue.run)
        run.record_fault("rogue publisher")
        await until(lambda: rogue.rounds >= LEAST_ROUNDS, deadline_s=60, what="the rogue's messages are read")
        await fleet.store.client.flushall()
        run.record_fault("FLUSHALL")
        await run.wait_for_answers(10)
        await run.wait_until_exact()
        tasks.cancel_scope.cancel()
    victims = [worker.worker_id for worker in fleet.workers]
    for kind in ("events", "alive", "grant", "control"):
        for victim in victims:
            tried = [line for line in rogue.refused if f"kvatlas.{kind}." in line and f"{victim}" in line]
            assert tried, f"NATS let the rogue use the {kind} subject of {victim}: {sorted(rogue.refused)}"
    logs = "".join(indexer.child.log_text() for indexer in fleet.indexers)
    for line in (
        f"worker {ROGUE}: publisher {ROGUE} may not speak for its tenant",
        f"kvatlas.alive.{ROGUE}",
        "kvatlas.grant.",
    ):
        assert line in logs, f"no indexer's log says {line!r}"
    run.mark_healed()


SCENARIOS = (rogue_publisher_attacks,)
