import pytest

from kvatlas.reservations import Reservations
from tests.kvatlas.reservations.asks import Clock
from tests.kvatlas.reservations.queue.line import Line


@pytest.fixture
async def line(reservations: Reservations, clock: Clock) -> Line:
    line = Line(reservations, clock)
    await line.idle()
    return line
