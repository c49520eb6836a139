"""How evenly several routers spread a burst of requests, compared with one."""
