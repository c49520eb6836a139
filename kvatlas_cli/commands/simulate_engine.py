"""`kvatlas simulate-engine`: an engine without a model that speaks vLLM's protocols."""

from kvatlas_cli.flags import with_settings
from kvatlas_cli.runner import print_ready, run_service
from kvatlas_simulator.service import EngineAddresses, run_engine
from kvatlas_simulator.settings import EngineSettings


@with_settings(EngineSettings)
def simulate_engine(settings: EngineSettings) -> None:
    """Run a simulated engine: a real paged KV cache behind vLLM's HTTP and event sockets, without a model."""
    run_service("engine", settings, run_engine(settings, ready=_print_ready))


def _print_ready(addresses: EngineAddresses) -> None:
    replay = f", replay on {addresses.replay_endpoint}" if addresses.replay_endpoint else ""
    print_ready(f"engine at {addresses.base_url}; events on {addresses.endpoint}{replay}")
