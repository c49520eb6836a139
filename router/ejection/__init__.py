"""Temporarily withholds requests from workers that fail more often than the rest of their pool.

pool_ejections.py   pure: what one router knows about a pool's workers, and which of them it avoids
monitor.py          the ejections of all pools, shared with the other routers through the store
avoidance.py        makes choices that avoid these workers
retry_budget.py     limits how many requests may be retried
"""
