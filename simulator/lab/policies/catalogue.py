"""Every policy by name, and how to create it for a fleet."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvatlas.index.memory.index import MemoryIndex
from kvatlas_router.admission.queue import QueueSettings
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.lab.engine import VirtualEngine
from kvatlas_simulator.lab.policies.approximate_trees import (
    InferenceExtension,
    LlmD,
    SglangRouter,
    UnboundedExtension,
)
from kvatlas_simulator.lab.policies.atlas import Atlas, AtlasSettings, OverlapOnly
from kvatlas_simulator.lab.policies.cache_blind import LeastLoaded, PrefixHash, RandomChoice, RoundRobin, SessionSticky
from kvatlas_simulator.lab.policies.dynamo.policy import PACKAGE, Dynamo
from kvatlas_simulator.lab.policies.oracle import Oracle
from kvatlas_simulator.lab.policies.outstanding_tokens import LeastPrefillTokens, LMetric, PrefixTokens
from kvatlas_simulator.lab.policies.protocol import Policy
from router_client.settings import BookingSettings, SloMode


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet for which a policy is created. `index`: filled by events, if the policy uses them. `dynamo_python`: a
    Python that has Dynamo."""

    engines: Sequence[VirtualEngine]
    index: MemoryIndex
    cost: StepCost
    rng: random.Random
    dynamo_python: str


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """`meaning`: one line for reports. `uses_events`: the engines' events go into the index. `own_index`: they go to the
    policy instead, with the engines' own hashes. `equal_seeds`: all engines use one hash seed; applies only with `own_index`.
    `atlas`: the settings of a kvatlas policy."""

    meaning: str
    make: Callable[[Fleet], Policy]
    uses_events: bool = False
    own_index: bool = False
    equal_seeds: bool = True
    atlas: AtlasSettings | None = None


DYNAMO = "dynamo"
DYNAMO_POLICIES = (DYNAMO, "dynamo-load-scale-8", "dynamo-unequal-seeds")


def _atlas(meaning: str, settings: AtlasSettings | None = None) -> PolicyKind:
    chosen = settings or AtlasSettings()
    return PolicyKind(
        meaning, lambda f: Atlas(f.engines, f.index, f.cost, chosen), uses_events=chosen.events, atlas=chosen
    )


POLICIES: Mapping[str, PolicyKind] = {
    "random": PolicyKind("any engine", lambda f: RandomChoice(f.engines, f.rng)),
    "round-robin": PolicyKind("each engine in turn", lambda f: RoundRobin(f.engines, f.rng)),
    "least-loaded": PolicyKind("fewest open requests", lambda f: LeastLoaded(f.engines, f.rng)),
    "session": PolicyKind("a session keeps its engine", lambda f: SessionSticky(f.engines, f.rng)),
    "prefix-hash": PolicyKind(
        "consistent hash of the first 2,048 tokens, load at most 1.25 x the mean",
        lambda f: PrefixHash(f.engines, f.rng),
    ),
    "sglang-router": PolicyKind(
        "approximate tree, as SGLang's and vLLM's routers", lambda f: SglangRouter(f.engines, f.rng)
    ),
    "inference-extension": PolicyKind(
        "approximate prefixes of up to 4,096 tokens, queue and cache use weighted, as the inference extension",
        lambda f: InferenceExtension(f.engines, f.rng),
    ),
    "unbounded-extension": PolicyKind("the same for whole prompts", lambda f: UnboundedExtension(f.engines, f.rng)),
    "llm-d": PolicyKind(
        "prefixes by the index, queue and cache use weighted, as llm-d",
        lambda f: LlmD(f.engines, f.rng, f.index),
        uses_events=True,
    ),
    "least-prefill-tokens": PolicyKind(
        "fewest outstanding prompt tokens", lambda f: LeastPrefillTokens(f.engines, f.rng)
    ),
    "prefix-tokens": PolicyKind(
        "fewest outstanding prompt tokens, less approximate prefixes", lambda f: PrefixTokens(f.engines, f.rng)
    ),
    "lmetric": PolicyKind("the same times open requests (LMetric)", lambda f: LMetric(f.engines, f.rng)),
    "overlap-only": PolicyKind(
        "most overlap by the index", lambda f: OverlapOnly(f.engines, f.index), uses_events=True
    ),
    "kvatlas": _atlas("as shipped"),
    "kvatlas-fetching": _atlas("engines fetch KV from each other", AtlasSettings(fetches=True)),
    "kvatlas-engine-priority": _atlas(
        "engines' queues are ordered by arrival and work", AtlasSettings(priorities=True)
    ),
    "kvatlas-slo-penalty": _atlas(
        "engines that would miss the objective cost more", AtlasSettings(slo=SloMode.PENALTY)
    ),
    "kvatlas-shedding": _atlas("requests that no engine could begin within 2 s are refused", AtlasSettings(sheds=True)),
    "kvatlas-queue": _atlas(
        "requests wait in one queue while every engine is full, by its reported slots and KV",
        AtlasSettings(slots=True, queue=QueueSettings(requests=10_000, tokens=1 << 40)),
    ),
    "kvatlas-no-reservations": _atlas(
        "load only as reported", AtlasSettings(BookingSettings(reservations=False, prefixes_in_flight=False))
    ),
    "kvatlas-no-prefixes-in-flight": _atlas(
        "prompts being computed do not count", AtlasSettings(BookingSettings(prefixes_in_flight=False))
    ),
    "kvatlas-no-interference": _atlas(
        "what a choice costs other requests does not count", AtlasSettings(BookingSettings(interference_factor=0.0))
    ),
    "kvatlas-no-learned-rates": _atlas("default rates", AtlasSettings(learning=False)),
    "kvatlas-no-events": _atlas("what engines hold is predicted", AtlasSettings(events=False)),
    "kvatlas-no-marks": _atlas("all that hybrids hold counts as reusable", AtlasSettings(marks=False)),
    "kvatlas-3-replicas": _atlas("three routers, one set of bookings", AtlasSettings(replicas=3)),
    "kvatlas-3-replicas-unshared": _atlas("three routers, each with its own", AtlasSettings(replicas=3, shared=False)),
    "kvatlas-true-rates": _atlas("prices are the engines' costs", AtlasSettings(true_rates=True)),
    "kvatlas-true-loads": _atlas("sees loads and queues at each choice", AtlasSettings(true_loads=True)),
    "kvatlas-true-loads-and-rates": _atlas("both", AtlasSettings(true_loads=True, true_rates=True)),
    "kvatlas-no-again": _atlas(
        "computing a prefix that another engine is computing costs no more than its prefill",
        AtlasSettings(BookingSettings(again_factor=0.0)),
    ),
    DYNAMO: PolicyKind(
        f"NVIDIA Dynamo's selection service ({PACKAGE}, as it ships; see --dynamo-python)",
        lambda f: Dynamo(f.engines, f.dynamo_python),
        uses_events=True,
        own_index=True,
    ),
    "dynamo-load-scale-8": PolicyKind(
        "the same with DYN_ROUTER_PREFILL_LOAD_SCALE=8",
        lambda f: Dynamo(f.engines, f.dynamo_python, {"DYN_ROUTER_PREFILL_LOAD_SCALE": "8"}),
        uses_events=True,
        own_index=True,
    ),
    "dynamo-unequal-seeds": PolicyKind(
        "the same with a hash seed of each engine's own, against its guide",
        lambda f: Dynamo(f.engines, f.dynamo_python),
        uses_events=True,
        own_index=True,
        equal_seeds=False,
    ),
    "oracle": PolicyKind("sees caches, queues and costs as they are", lambda f: Oracle(f.engines, f.cost)),
}

LIVE_POLICIES = tuple(
    name
    for name, kind in POLICIES.items()
    if (one := kind.atlas) is not None
    and one.events
    and one.marks
    and one.shared
    and not (one.true_loads or one.true_rates or one.fetches or one.queue)
)
"""Policies that can be replayed against real servers."""

DEFAULT_POLICIES = (
    "round-robin", "least-loaded", "session", "prefix-hash", "sglang-router", "inference-extension", "llm-d",
    "least-prefill-tokens", "prefix-tokens", "lmetric", "kvatlas", "oracle",
)  # fmt: skip
