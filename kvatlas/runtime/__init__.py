"""Asyncio and logging for every process: HTTP server, retries, back-off, background tasks, wake-ups, log."""
