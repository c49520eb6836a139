"""Policies that ignore caches: random, round-robin, least loaded, sticky sessions, and a consistent hash of the
prefix."""

import math
import random
from collections.abc import Sequence

import xxhash

from kvatlas_simulator.lab.engine import VirtualEngine
from kvatlas_simulator.lab.policies.protocol import OpenRequests
from kvatlas_simulator.lab.requests import LabRequest


class RandomChoice(OpenRequests):
    """A random engine."""

    def choose(self, request: LabRequest, now_us: float) -> int:
        return self.send(self._rng.choice(self.up))


class RoundRobin(OpenRequests):
    """Each engine in turn."""

    _turn = -1

    def choose(self, request: LabRequest, now_us: float) -> int:
        self._turn += 1
        return self.send(self.up[self._turn % len(self.up)])


class LeastLoaded(OpenRequests):
    """The engine with the fewest open requests; a random one among equals."""

    def choose(self, request: LabRequest, now_us: float) -> int:
        return self.send(self.least_open())


class SessionSticky(OpenRequests):
    """A session stays with the engine of its first request, which had the fewest open requests at that time."""

    def __init__(self, engines: Sequence[VirtualEngine], rng: random.Random) -> None:
        super().__init__(engines, rng)
        self._home: dict[int, int] = {}

    def choose(self, request: LabRequest, now_us: float) -> int:
        home = self._home.get(request.session)
        if home is None or not self.engines[home].up:
            home = self._home[request.session] = self.least_open()
        return self.send(home)


class PrefixHash(OpenRequests):
    """A consistent hash of the prompt's start with bounded load, as shipped by gateways: the first engine on the ring,
    starting at the prefix's place, that has at most `LOAD_FACTOR` times the mean number of open requests.

    Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads"; a load factor of 1.25 is usual.
    """

    PREFIX_TOKENS = 2_048
    LOAD_FACTOR = 1.25

    def choose(self, request: LabRequest, now_us: float) -> int:
        block_tokens, up = self.engines[0].block_tokens, self.up
        blocks = max(1, self.PREFIX_TOKENS // block_tokens)
        prefix = repr((request.prompt_contents(block_tokens)[:blocks], request.identity)).encode()
        most = math.ceil(self.LOAD_FACTOR * (sum(self.open[engine] for engine in up) + 1) / len(up))
        ring = sorted(up, key=lambda engine: xxhash.xxh3_64_intdigest(prefix, seed=engine))
        return self.send(next(engine for engine in ring if self.open[engine] < most))
