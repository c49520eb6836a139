"""Users of NATS and of the store, and their permissions, defined only here.

nats_users.py     publishers, indexer and auditor, with their subjects
redis_users.py    indexer, router and auditor, with their commands and keys
secret_files.py   passwords, seeds and their URLs, in a folder that only its owner can read
"""
