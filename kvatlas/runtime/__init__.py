"""What every process of kvatlas needs of asyncio and logging: an HTTP server, retries, wake-ups, a rate-limited log."""
