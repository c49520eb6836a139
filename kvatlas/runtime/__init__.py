"""Asyncio and logging for every process: retries, back-off, background tasks, wake-ups, certificate files, and the log."""
