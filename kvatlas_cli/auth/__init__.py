"""Users of NATS and of the store, and their permissions, defined only here.

nats_users.py     publishers, indexer, auditor: subjects
redis_users.py    indexer, router, auditor: commands and keys
secret_files.py   passwords, seeds and their URLs, in a folder that only its owner can read
"""
