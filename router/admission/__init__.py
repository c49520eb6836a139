"""Finds a worker for a request, for the proxy and for the gateways' endpoint picker.

admission.py   books a worker, avoiding failing ones; if all are full, queues or refuses the request
queue.py       this router's part of the pool's queue: requests that wait while every worker is full
"""
