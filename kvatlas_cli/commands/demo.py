"""`kvatlas demo`: the whole system on this machine, round-robin compared with kvatlas."""

from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.runner import run_service
from kvatlas_simulator.demo import DemoSettings, run_demo


@with_settings(DemoSettings)
def demo(settings: DemoSettings, as_json: JsonFlag = False) -> None:
    """Start simulated engines on this machine and route one workload twice: round-robin, then with kvatlas."""
    run_service("demo", settings, run_demo(settings, as_json=as_json))
