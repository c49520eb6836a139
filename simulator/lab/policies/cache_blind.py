"""Policies that ignore caches: random, round-robin, least loaded, sessions, consistent hash of the prefix."""

import math
import random

import xxhash

from kvatlas_simulator.lab.policies.protocol import LoadBlind, OpenRequests
from kvatlas_simulator.lab.requests import LabRequest


class RandomChoice(LoadBlind):
    """A random engine."""

    def __init__(self, engines: int, rng: random.Random) -> None:
        self._engines = engines
        self._rng = rng

    def choose(self, request: LabRequest, now_us: float) -> int:
        return self._rng.randrange(self._engines)


class RoundRobin(LoadBlind):
    """Each engine in turn."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._turn = -1

    def choose(self, request: LabRequest, now_us: float) -> int:
        self._turn = (self._turn + 1) % self._engines
        return self._turn


class LeastLoaded(OpenRequests):
    """The engine with the fewest open requests; a random one among equals."""

    def __init__(self, engines: int, rng: random.Random) -> None:
        super().__init__(engines)
        self._rng = rng

    def choose(self, request: LabRequest, now_us: float) -> int:
        least = min(self.open)
        return self.send(self._rng.choice([i for i, count in enumerate(self.open) if count == least]))


class SessionSticky(OpenRequests):
    """A session stays with the engine of its first request, the one with the fewest open requests at that time."""

    def __init__(self, engines: int, rng: random.Random) -> None:
        super().__init__(engines)
        self._rng = rng
        self._home: dict[int, int] = {}

    def choose(self, request: LabRequest, now_us: float) -> int:
        home = self._home.get(request.session)
        if home is None:
            least = min(self.open)
            home = self._rng.choice([i for i, count in enumerate(self.open) if count == least])
            self._home[request.session] = home
        return self.send(home)


class PrefixHash(OpenRequests):
    """Consistent hash of the prompt's start with bounded load, as gateways ship it: the first engine on the ring, starting
    at the prefix's place, with at most `load_factor` times the mean of open requests.

    Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads"; a load factor of 1.25 is usual.
    """

    def __init__(
        self, engines: int, *, block_tokens: int, prefix_tokens: int = 2_048, load_factor: float = 1.25
    ) -> None:
        super().__init__(engines)
        self._blocks = max(1, prefix_tokens // block_tokens)
        self._block_tokens = block_tokens
        self._load_factor = load_factor

    def choose(self, request: LabRequest, now_us: float) -> int:
        prefix = repr((request.prompt_contents(self._block_tokens)[: self._blocks], request.identity)).encode()
        most = math.ceil(self._load_factor * (sum(self.open) + 1) / len(self.open))
        ring = sorted(range(len(self.open)), key=lambda i: xxhash.xxh3_64_intdigest(prefix, seed=i))
        return self.send(next(i for i in ring if self.open[i] < most))
