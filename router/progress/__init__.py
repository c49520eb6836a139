"""Judges by their progress, not by a status page, whether engines are alive.

expected_times.py    pure: how long a pool's engines take until the first byte, and how much these times vary
engine_progress.py   pure: one engine's state: alive, suspected, stalled or probing
watched_attempt.py   a request to one engine, watched for progress
monitor.py           all engines: collects evidence, probes, and moves requests elsewhere
"""
