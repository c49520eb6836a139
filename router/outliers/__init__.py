"""Workers that answer worse than the rest of their pool get no requests for a while.

pool_outliers.py   pure: what one router knows of a pool's workers, and which of them it avoids
monitor.py         the same for all pools, shared with the other routers through the store
avoidance.py       choices around the workers that it names
retry_budget.py    how many requests may be tried again
"""
