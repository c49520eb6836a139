"""Withholds requests for a while from workers that fail more than the rest of their pool.

pool_ejections.py   pure: what one router knows of a pool's workers, and which of them it avoids
monitor.py          the ejections of all pools, shared with the other routers through the store
avoidance.py        makes choices that avoid these workers
retry_budget.py     how many requests may be retried
"""
