"""The state of a worker in one word, the same in every command."""

from kvatlas.fleet.records import EngineState, FleetRecord, Liveness


def state_word(record: FleetRecord) -> str:
    """`lost` before anything else, `in doubt` if the engine is up and the index may be wrong about it, else the engine's."""
    if record.liveness is Liveness.LOST:
        return "lost"
    if record.state is EngineState.UP and record.doubt:
        return "in doubt"
    return record.state.value
