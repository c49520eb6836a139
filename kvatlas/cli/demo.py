"""`kvatlas demo`: the whole system on this machine, round-robin against kvatlas."""

from kvatlas.cli.flags import with_settings
from kvatlas.cli.running import run_service
from kvatlas.settings import ProcessSettings


@with_settings(ProcessSettings)
def demo(settings: ProcessSettings) -> None:
    """Run 4 simulated engines on one machine and route one workload twice: round-robin, then by kvatlas."""
    from simulator.demo import run_demo  # needs the extra

    run_service("demo", settings, run_demo())
