"""The extension's objects for requests: InferenceObjective sets a priority; InferenceModelRewrite sets a different
model.

Version v1alpha2 of the group `inference.networking.x-k8s.io` (Inference Extension) or `llm-d.ai` (llm-d-router 0.9).
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field

from kvatlas_router.gateway.kubernetes_api import KubernetesApi, PeriodicRead, parse_objects

OBJECTIVE_HEADERS = (b"x-gateway-inference-objective", b"x-llm-d-inference-objective")


class _Metadata(BaseModel):
    name: str
    creationTimestamp: str = ""  # noqa: N815 - Kubernetes' name


class _PoolRef(BaseModel):
    name: str


class _ObjectiveSpec(BaseModel):
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    poolRef: _PoolRef  # noqa: N815


class _Objective(BaseModel):
    metadata: _Metadata
    spec: _ObjectiveSpec


class _ModelMatch(BaseModel):
    value: Annotated[str, Field(min_length=1)]


class _Match(BaseModel):
    model: _ModelMatch


class _Target(BaseModel):
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    modelRewrite: Annotated[str, Field(min_length=1)]  # noqa: N815


class _Rule(BaseModel):
    matches: list[_Match] = []
    targets: list[_Target] = []


class _RewriteSpec(BaseModel):
    poolRef: _PoolRef  # noqa: N815
    rules: list[_Rule]


class _Rewrite(BaseModel):
    metadata: _Metadata
    spec: _RewriteSpec


Targets = Sequence[tuple[str, int]]
"""Models with their weights."""


@dataclass(frozen=True, slots=True)
class PoolObjects:
    """`priorities`: by the objective's name; higher values are more important. `rewrites`: targets, by the model that a
    request names. `rewrites_any`: targets for any other model."""

    priorities: Mapping[str, int] = field(default_factory=dict)
    rewrites: Mapping[str, Targets] = field(default_factory=dict)
    rewrites_any: Targets = ()

    @classmethod
    def of(cls, pool: str, objectives: Iterable[Any], rewrites: Iterable[Any]) -> tuple["PoolObjects", Sequence[str]]:
        """The pool's objects among those of a namespace, and one line for each object that is left out because it can't
        be read.

        An exact match takes precedence over a rule for all models; after that, an older object over a newer one, and an
        earlier rule over a later one.
        """
        wrong: list[str] = []
        priorities = {
            one.metadata.name: one.spec.priority or 0
            for one in parse_objects("InferenceObjective", _Objective, objectives, wrong)
            if one.spec.poolRef.name == pool
        }
        exact: dict[str, Targets] = {}
        for_any: Targets = ()
        found = [
            one
            for one in parse_objects("InferenceModelRewrite", _Rewrite, rewrites, wrong)
            if one.spec.poolRef.name == pool
        ]
        for one in sorted(found, key=lambda each: (each.metadata.creationTimestamp, each.metadata.name)):
            for rule in one.spec.rules:
                targets = [(target.modelRewrite, target.weight) for target in rule.targets]
                for match in rule.matches:
                    exact.setdefault(match.model.value, targets)
                if not rule.matches:
                    for_any = for_any or targets
        return cls(priorities, exact, for_any), wrong

    def rewrite(self, model: str) -> str:
        """The model to ask the engine for, drawn by weight if there are several targets."""
        targets = self.rewrites.get(model, self.rewrites_any)
        if not targets:
            return model
        return random.choices([name for name, _ in targets], [weight for _, weight in targets])[0]


class ExtensionObjects(PeriodicRead):
    """A pool's objects, read periodically. While the API does not answer, the objects that were read last stay in
    use."""

    def __init__(self, api: KubernetesApi | None, group: str, pool: str) -> None:
        """`api=None`: there are no objects."""
        super().__init__("extension's objects")
        self.current = PoolObjects()
        self._api = api
        self._version = f"{group}/v1alpha2"
        self._pool = pool

    async def start(self) -> None:
        """Read once, then in the background. Does nothing without an API."""
        if self._api is not None:
            await super().start()

    async def _read(self) -> Sequence[str]:
        assert self._api is not None
        objectives = await self._api.list_objects(self._version, "inferenceobjectives")
        rewrites = await self._api.list_objects(self._version, "inferencemodelrewrites")
        self.current, wrong = PoolObjects.of(self._pool, objectives, rewrites)
        return wrong
