"""The workers' rows, made from fleet records."""

import re
import time
from collections.abc import Sequence

import pytest

from kvatlas.blocks.digest import WORDS
from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import (
    EngineEndpoint,
    EngineKind,
    EngineState,
    FleetRecord,
    ForwardPassMetrics,
    Liveness,
    Repair,
    WorkerState,
)
from kvatlas.status_page.content import Tone
from kvatlas.status_page.workers import MOST_WORKERS, workers_fact, workers_section

pytestmark = pytest.mark.anyio


def record(worker_id: str, state: EngineState = EngineState.UP, **fields: object) -> FleetRecord:
    endpoint = EngineEndpoint(id=worker_id, kind=EngineKind.VLLM, model_id="m", tokenizer_id="m")
    return FleetRecord.model_validate({"endpoint": endpoint, "state": state, "liveness": Liveness.ALIVE, **fields})


async def digest(worker_id: str) -> Sequence[int] | None:
    """Three blocks in HBM and two in the host's memory."""
    words = [0] * WORDS
    words[3 * Tier.HBM], words[3 * Tier.CPU_DRAM] = 3, 2
    return None if worker_id == "new" else words


async def test_a_row_says_state_blocks_by_tier_load_last_event_and_last_repair() -> None:
    now_us = time.time_ns() // 1_000
    load = WorkerState(id="w", running_decodes=4, forward_pass=ForwardPassMetrics(requests_waiting=7, cache_usage=0.25))
    repair = Repair(at_us=now_us - 90_000_000, reason="missing message")
    section = await workers_section(
        {"w": record("w", load=load, incarnation=12, heard_us=now_us, applied_us=now_us - 5_000_000, repair=repair)},
        digest,
    )
    (row,) = section.tables[0].rows
    texts = [cell.text for cell in row]
    assert texts[:7] == ["w", "up", "m", "3 hbm + 2 cpu_dram", "4", "7", "25%"]
    assert re.fullmatch(r"5\.\d s ago", texts[7]) and re.fullmatch(r"90\.\d s ago: missing message", texts[8])
    assert texts[10] == "12"
    assert row[6].share == 0.25


async def test_workers_that_need_attention_come_first_and_rows_are_bounded() -> None:
    records = {f"w{number:03}": record(f"w{number:03}") for number in range(MOST_WORKERS + 5)}
    records["x-down"] = record("x-down", EngineState.DOWN)
    records["x-lost"] = record("x-lost", liveness=Liveness.LOST)
    records["y-doubt"] = record("y-doubt", doubt="missing message")
    (table,) = (await workers_section(records, digest)).tables
    assert [row[1].text for row in table.rows[:4]] == ["down", "lost", "in doubt", "up"]
    assert table.rows[2][1].hint == "missing message"
    assert len(table.rows) == MOST_WORKERS and "8 more workers" in table.note
    fact = workers_fact(records)
    assert fact.value.text == f"{MOST_WORKERS + 6} of {MOST_WORKERS + 8}" and fact.value.tone is Tone.WARNING


async def test_a_worker_of_which_little_is_known_has_dashes() -> None:
    (row,) = (await workers_section({"new": record("new")}, digest)).tables[0].rows
    assert [cell.text for cell in row] == ["new", "up", "m", "–", "–", "–", "–", "–", "–", "–", "0"]
