"""Fleet records of the workers that a benchmark routes to."""

from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness, WorkerState
from kvatlas.identity import Scope

BLOCK_SIZE = 16


def routable_record(scope: Scope, load: WorkerState, *, base_url: str = "") -> FleetRecord:
    """The record of a routable worker with this load; `load.id` is the worker's id."""
    endpoint = EngineEndpoint(
        id=load.id,
        kind=EngineKind.VLLM,
        base_url=base_url,
        model_id=scope.model_id,
        tokenizer_id=scope.tokenizer_id,
        block_size=BLOCK_SIZE,
    )
    return FleetRecord(endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE, load=load, incarnation=1)
