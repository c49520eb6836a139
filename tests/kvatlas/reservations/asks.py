"""Asks, bookings and stores with a clock that tests set."""

from collections.abc import Sequence

from kvatlas.cost import Load, Prices
from kvatlas.reservations import (
    Ask,
    Booking,
    Evaluation,
    MemoryReservations,
    Offer,
    OfferKind,
    Reservations,
    StepChain,
)
from kvatlas.reservations.evaluation import Predictions, Weighed, worth_us
from kvatlas.reservations.protocol import Fetching
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.reservations.search import Search
from kvatlas.store.connection import Store

POOL = "pool"
CLOCK_KEY = f"kva:{{pool:{POOL}}}:test-clock"
START_US = 1_700_000_000_000_000
SECOND_US = 1_000_000
LEASE_US = 5 * SECOND_US
LONGEST_US = 600 * SECOND_US
STEP_TOKENS = 128

PRICES = Prices(40.0, 5_000.0, 5.0, 1_024, 40.0, 0.0005)


class _EveryWorker(Search):
    def _weigh_cheapest(self, predictions: Predictions, mean: Load) -> Weighed:
        return self._weigh(self.rows, predictions, mean)


class FullScan(MemoryReservations):
    """The model that others are held against: it evaluates every look-alike."""

    search = _EveryWorker


class Clock:
    """Sets the time of both stores."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.now_us = START_US

    def __call__(self) -> int:
        return self.now_us

    async def prepare(self) -> None:
        """Install functions that read this clock instead of the server's, and that read look-alikes in the smallest steps."""
        code = POOL_LIBRARY.code
        for real, settable in {
            POOL_LIBRARY.source(
                "_clock"
            ): f"local function now_us() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end",
            "FIRST_READ, MOST_READ = 4, 512": "FIRST_READ, MOST_READ = 1, 2",
        }.items():
            assert real in code
            code = code.replace(real, settable)
        await self._store.load_functions(code)
        await self.pass_us(0)

    async def pass_us(self, us: int) -> None:
        self.now_us += us
        await self._store.client.set(CLOCK_KEY, str(self.now_us))


def id_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def steps(*numbers: int) -> bytes:
    """A chain of steps; numbers that are equal up to a place make an equal prefix."""
    out, seen = b"", 0
    for number in numbers:
        seen = (seen * 1_000_003 + number + 1) % (1 << 64)
        out += seen.to_bytes(8, "little")
    return out


def offer(
    worker_id: str,
    *,
    input_tokens: int = 1_000,
    chain: int | None = None,
    held_steps: int = 0,
    prices: Prices = PRICES,
    lost_tokens: int = 0,
    believed_us: int = 5 * SECOND_US,
    capacity_steps: int = 0,
    interference: float = 0.0,
    extra_us: float = 0.0,
    fetching: Fetching | None = None,
) -> Offer:
    """An offer of a worker that holds `held_steps`, at the cost of computing the rest and decoding."""
    cached = min(held_steps * STEP_TOKENS, input_tokens - 1)
    saved = worth_us(prices, cached)
    work = worth_us(prices, input_tokens) - saved
    return Offer(
        worker_id,
        OfferKind(chain, input_tokens - 1, lost_tokens, prices, believed_us, capacity_steps, interference),
        held_steps,
        cached,
        work + 900_000 + extra_us,
        work,
        fetching,
    )


def ask(offers: Sequence[Offer], chain: bytes | None = None, again_factor: float = 16.0) -> Ask:
    chains = () if chain is None else (StepChain(STEP_TOKENS, chain),)
    return Ask(offers, chains, again_factor)


async def book(
    reservations: Reservations, number: int, asked: Ask, *, router: str = "r", input_tokens: int = 1_000
) -> str | None:
    """Book, and return the chosen worker."""
    booking = Booking(id_of(number), router, input_tokens, asked, LEASE_US, LONGEST_US)
    found = await reservations.book(POOL, booking)
    return None if found is None else found.worker_id


def same_evaluation(real: Evaluation, model: Evaluation) -> bool:
    """True if they agree, as far as `real` has read the look-alikes."""
    places = {offer.worker_id: i for i, offer in enumerate(model.offers)}

    def place(i: int) -> int:
        return i if real.offers[i] == model.offers[i] else places[real.offers[i].worker_id]

    read = range(len(real.offers))
    return (
        (real.worker_id, real.prefill, real.source) == (model.worker_id, model.prefill, model.source)
        and all(real.offers[i] == model.offers[place(i)] for i in read)
        and all(real.by_offer[i] == model.by_offer[place(i)] for i in read)
    )
