"""A worker for a request, for whatever server gets it: the proxy, and the endpoint picker of gateways.

admission.py   books around workers that fail, in turn if all are full, or refuses
queue.py       requests that wait while every worker is full
"""
