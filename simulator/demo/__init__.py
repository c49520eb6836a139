"""`kvatlas demo`: the whole system on one machine, one workload twice, a table."""

from kvatlas_simulator.demo.demo import DemoSettings, run_demo

__all__ = ["DemoSettings", "run_demo"]
