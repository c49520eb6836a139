"""Generated workloads: chats, agents, retrieval, tenants with adapters, bursts, long thought, and giants. The same seed gives
the same requests.

All arrivals are fixed in advance: a turn follows the previous one as if that one had been answered at a usual speed. So every
policy gets the same requests at the same times.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from kvatlas.identity import DEFAULT_TENANT
from kvatlas_simulator.lab.requests import Identity, LabRequest, Workload

BLOCK_TOKENS = 64
REQUESTS = 4_000
REQUESTS_PER_S = 6.7
ANSWER_S_PER_TOKEN = 0.02
"""Speed at which a user or a program reads an answer before continuing."""


class Arrivals(StrEnum):
    """The times at which sessions begin. `POISSON`: at a constant mean rate. `BURSTY`: a third of them within 5 s of each
    minute. `DIURNAL`: at a rate that follows a sine over the whole time, as in one day, from a fifth of the mean to nearly
    twice the mean."""

    POISSON = "poisson"
    BURSTY = "bursty"
    DIURNAL = "diurnal"


@dataclass(slots=True)
class Text:
    """A sequence of tokens, as parts: (number of the part, tokens). Texts with equal parts share their blocks."""

    parts: tuple[tuple[int, int], ...] = ()

    def then(self, part: int, tokens: int) -> "Text":
        return Text((*self.parts, (part, tokens)))

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.parts)

    def blocks(self) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """The pieces of each block: (part, first token, end)."""
        pieces: list[tuple[int, int, int]] = []
        room = BLOCK_TOKENS
        for part, tokens in self.parts:
            at = 0
            while at < tokens:
                taken = min(room, tokens - at)
                pieces.append((part, at, at + taken))
                at, room = at + taken, room - taken
                if not room:
                    yield tuple(pieces)
                    pieces, room = [], BLOCK_TOKENS
        if pieces:
            yield tuple(pieces)


@dataclass(slots=True)
class Generator:
    """Collects the requests of one workload."""

    rng: random.Random
    arrivals: Arrivals
    wanted: int
    seconds: float
    parts: Iterator[int] = field(default_factory=count)
    requests: list[LabRequest] = field(default_factory=list)
    _contents: dict[tuple[tuple[int, int, int], ...], int] = field(default_factory=dict)
    _sessions: Iterator[int] = field(default_factory=count)

    def session(self) -> tuple[int, float]:
        """The number of a new session, and when it begins (s)."""
        return next(self._sessions), self._begin_s()

    def part(self, low: int, high: int) -> tuple[int, int]:
        """A unique part with a length in this range; most are short."""
        return next(self.parts), round(math.exp(self.rng.uniform(math.log(low), math.log(high))))

    def ask(
        self, text: Text, answer: tuple[int, int], session: int, at_s: float, identity: Identity
    ) -> tuple[Text, float]:
        """Add one request. Returns its text including the answer, and when the answer has been read."""
        whole = text.then(*answer)
        contents = tuple(self._contents.setdefault(block, len(self._contents)) for block in whole.blocks())
        self.requests.append(
            LabRequest(len(self.requests), at_s * 1e6, text.tokens, answer[1], contents, session, identity)
        )
        return whole, at_s + answer[1] * ANSWER_S_PER_TOKEN

    def heavy_tailed(self, least: int, most: int) -> tuple[int, int]:
        """A unique part whose length has a heavy tail: Pareto with exponent 1.1, capped at `most`."""
        return next(self.parts), min(most, round(least * self.rng.paretovariate(1.1)))

    def popular(self, things: int, skew: float = 1.0) -> int:
        """The number of one of these `things`; the first ones are the most popular (Zipf)."""
        return self.rng.choices(range(things), [1 / (rank + 1) ** skew for rank in range(things)])[0]

    def _begin_s(self) -> float:
        rng = self.rng
        if self.arrivals is Arrivals.BURSTY and rng.random() < 1 / 3:
            return 60 * rng.randrange(math.ceil(self.seconds / 60)) + rng.uniform(0, 5)
        while True:
            at_s = rng.uniform(0, self.seconds)
            if self.arrivals is not Arrivals.DIURNAL or 1.8 * rng.random() < 1 - 0.8 * math.cos(
                math.tau * at_s / self.seconds
            ):
                return at_s


def _chat(made: Generator) -> None:
    """Generate conversations of 1 to 10 turns after one of 20 system prompts."""
    prompts = [made.part(500, 4_000) for _ in range(20)]
    while len(made.requests) < made.wanted:
        _converse(made, Text((prompts[made.popular(20)],)), Identity())


def _converse(made: Generator, text: Text, identity: Identity, pause_s: float = 15) -> None:
    session, at_s = made.session()
    for _ in range(made.rng.randint(1, 10)):
        text, at_s = made.ask(text.then(*made.part(20, 600)), made.part(30, 500), session, at_s, identity)
        at_s += made.rng.expovariate(1 / pause_s)


def _idle(made: Generator) -> None:
    """Generate conversations whose users come back after minutes."""
    prompts = [made.part(500, 4_000) for _ in range(20)]
    while len(made.requests) < made.wanted:
        _converse(made, Text((prompts[made.popular(20)],)), Identity(), pause_s=180)


def _agents(made: Generator) -> None:
    """Generate agents with one of 6 long sets of tools: 4 to 20 steps, each followed by a tool's result; some fork into
    several attempts."""
    tools = [made.part(4_000, 12_000) for _ in range(6)]
    while len(made.requests) < made.wanted:
        session, at_s = made.session()
        branches = [(Text((tools[made.popular(6)],)).then(*made.part(100, 2_000)), at_s)]
        for _ in range(made.rng.randint(4, 20)):
            if len(branches) == 1 and made.rng.random() < 0.1:
                branches = branches * made.rng.randint(2, 4)
            grown = []
            for text, at in branches:
                text, at = made.ask(text, made.part(20, 200), session, at, Identity())
                grown.append((text.then(*made.part(50, 3_000)), at + made.rng.expovariate(1 / 2)))
            branches = grown


def _rag(made: Generator) -> None:
    """Generate questions after one instruction and 3 to 6 of 400 documents, popular ones first."""
    instruction = made.part(600, 600)
    documents = [made.part(400, 2_500) for _ in range(400)]
    while len(made.requests) < made.wanted:
        session, at_s = made.session()
        text = Text((instruction,))
        for number in sorted({made.popular(400, 0.9) for _ in range(made.rng.randint(3, 6))}):
            text = text.then(*documents[number])
        made.ask(text.then(*made.part(15, 100)), made.part(50, 300), session, at_s, Identity())


def _tenants(made: Generator) -> None:
    """Generate chats of 8 tenants, each with its own system prompts, with one of 4 adapters or none."""
    prompts = {tenant: [made.part(500, 3_000) for _ in range(5)] for tenant in range(8)}
    while len(made.requests) < made.wanted:
        tenant = made.popular(8)
        adapter = made.rng.choice([None, None, *(f"adapter-{number}" for number in range(4))])
        name = DEFAULT_TENANT if tenant == 0 else f"tenant-{tenant}"
        _converse(made, Text((prompts[tenant][made.popular(5)],)), Identity(adapter, name))


def _tails(made: Generator) -> None:
    """Generate requests of 200 tenants, a few of which send most; prompts and answers have heavy tails."""
    prompts = [made.heavy_tailed(400, 20_000) for _ in range(200)]
    while len(made.requests) < made.wanted:
        tenant = made.popular(200, 1.2)
        session, at_s = made.session()
        text = Text((prompts[tenant],)).then(*made.heavy_tailed(50, 20_000))
        made.ask(text, made.heavy_tailed(20, 2_000), session, at_s, Identity(None, f"tenant-{tenant}"))


def _bursts(made: Generator) -> None:
    """Generate bursts: 20 to 60 questions within half a second, with a prefix that no earlier request has."""
    while len(made.requests) < made.wanted:
        _, begins_s = made.session()
        shared = Text((made.part(3_000, 10_000),))
        for _ in range(made.rng.randint(20, 60)):
            session, _ = made.session()
            at_s = begins_s + made.rng.uniform(0, 0.5)
            made.ask(shared.then(*made.part(20, 300)), made.part(30, 300), session, at_s, Identity())


def _thought(made: Generator) -> None:
    """Generate short questions after one of 5 system prompts, with answers of 500 to 4,000 tokens."""
    prompts = [made.part(500, 2_000) for _ in range(5)]
    while len(made.requests) < made.wanted:
        session, at_s = made.session()
        text = Text((prompts[made.popular(5)],)).then(*made.part(50, 1_000))
        made.ask(text, made.part(500, 4_000), session, at_s, Identity())


def _giants(made: Generator) -> None:
    """Generate chats; one request in 40 has a prompt of 40,000 to 100,000 tokens that no earlier one has."""
    prompts = [made.part(500, 4_000) for _ in range(20)]
    giants = 0
    while len(made.requests) < made.wanted:
        _converse(made, Text((prompts[made.popular(20)],)), Identity())
        if len(made.requests) > 40 * giants:
            giants += 1
            session, at_s = made.session()
            made.ask(Text((made.part(40_000, 100_000),)), made.part(50, 300), session, at_s, Identity())


_KINDS: Mapping[str, Callable[[Generator], None]] = {
    "chat": _chat,
    "idle": _idle,
    "agents": _agents,
    "rag": _rag,
    "tenants": _tenants,
    "tails": _tails,
    "bursts": _bursts,
    "thought": _thought,
    "giants": _giants,
}
WORKLOADS = tuple(
    name if arrivals is Arrivals.POISSON else f"{name}-{arrivals}" for name in _KINDS for arrivals in Arrivals
)
"""Names of generated workloads; without a suffix, sessions begin as a Poisson process."""


def generate(name: str, seed: int, requests: int = REQUESTS) -> Workload:
    """The workload with this name (one of WORKLOADS) and this many requests."""
    kind, _, arrivals = name.partition("-")
    made = Generator(
        random.Random(f"{name} {seed}"), Arrivals(arrivals or Arrivals.POISSON), requests, requests / REQUESTS_PER_S
    )
    _KINDS[kind](made)
    in_order = sorted(made.requests[:requests], key=lambda request: (request.arrival_us, request.number))
    numbered = [
        LabRequest(i, r.arrival_us, r.input_tokens, r.output_tokens, r.contents, r.session, r.identity)
        for i, r in enumerate(in_order)
    ]
    return Workload(name, BLOCK_TOKENS, numbered)
