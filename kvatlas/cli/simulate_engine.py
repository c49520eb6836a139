"""`kvatlas simulate-engine`: an engine without a model, that speaks vLLM's protocols."""

from kvatlas.cli.flags import with_settings
from kvatlas.cli.running import run_service
from kvatlas.settings import SimulatedEngineSettings


@with_settings(SimulatedEngineSettings)
def simulate_engine(settings: SimulatedEngineSettings) -> None:
    """Run a simulated engine: a real paged KV cache behind vLLM's HTTP and event sockets, and no model."""
    from simulator.service import run_engine  # needs the extra

    run_service("engine", settings, run_engine(settings))
