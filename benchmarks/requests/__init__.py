"""Requests of many clients through `kvatlas router`: several routers and a flaky engine, and a queue where all are full."""
