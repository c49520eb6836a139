"""`kvatlas demo`: runs the whole system on one machine, sends one workload twice, and prints a table."""

from kvatlas_simulator.demo.demo import DemoSettings, run_demo

__all__ = ["DemoSettings", "run_demo"]
