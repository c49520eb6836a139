"""Users of NATS and of the store, and what each may do: the one place that says it.

nats_users.py     publishers, indexer, auditor: subjects
redis_users.py    indexer, router, auditor: commands and keys
secret_files.py   passwords, seeds and what names them, in a folder that only its owner reads
"""
