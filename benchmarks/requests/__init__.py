"""Requests of many clients through `kvatlas router`: several routers with a flaky engine, and a queue when all engines are
full."""
