"""The state of a worker in one word, the same in every command."""

from kvatlas.fleet.records import EngineState, FleetRecord, Liveness


def state_word(record: FleetRecord) -> str:
    """`lost` takes precedence; then `in doubt` if the engine is up but the index may be wrong about it; otherwise the engine's
    state."""
    if record.liveness is Liveness.LOST:
        return "lost"
    if record.state is EngineState.UP and record.doubt:
        return "in doubt"
    return record.state.value
