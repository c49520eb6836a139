"""Is an engine alive? Its progress says so, not a status page.

expected_times.py    pure: how long the engines of a pool take to a first byte, and how far that spreads
engine_progress.py   pure: one engine: alive, suspected, stalled or probing
watched_try.py       a request at one engine, while it is watched
small_request.py     the real request that a doubtful engine is probed with
monitor.py           all engines: their evidence, their probes, and requests that go elsewhere
"""
