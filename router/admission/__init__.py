"""Finds a worker for a request, for both the proxy and the gateways' endpoint picker.

admission.py   books a worker, avoiding those that fail; queues the request if all are full, or refuses it
queue.py       this router's part of the pool's queue: requests that wait while every worker is full
"""
