"""The price of the time for which later requests wait behind a prompt; in the store and in process."""

import pytest

from kvatlas.cost import Load
from kvatlas.reservations import Ask, LoadReport, Reservations, WorkerReport
from kvatlas.reservations.evaluation import interference_us
from tests.kvatlas.reservations.asks import POOL, offer

pytestmark = pytest.mark.anyio

ARRIVALS = 20e-6
"""Twenty requests a second come to each worker."""


async def test_on_a_busy_fleet_a_new_prefix_goes_to_a_worker_without_a_queue(reservations: Reservations) -> None:
    loads = {"few-running": Load(4, 6_000, 0, 20_000), "no-queue": Load(8, 0, 0, 20_000)}
    await reservations.report(POOL, {id: WorkerReport(1, LoadReport(load)) for id, load in loads.items()})
    for arrivals, chosen in [(0.0, "few-running"), (ARRIVALS, "no-queue")]:
        offers = [offer(id, input_tokens=8_000, interference=0.4, arrivals=arrivals) for id in loads]
        assert (await reservations.evaluate(POOL, Ask(offers))).worker_id == chosen


async def test_later_requests_wait_for_the_backlog_and_for_half_of_the_work() -> None:
    assert interference_us(0.0, ARRIVALS, 300_000.0, 9, 500_000.0) == pytest.approx(300_000 * 20e-6 * 650_000)
    assert interference_us(0.5, 0.0, 300_000.0, 9, 500_000.0) == pytest.approx(300_000 * 4.5)
    assert interference_us(0.5, ARRIVALS, -1.0, 9, 500_000.0) == 0.0
