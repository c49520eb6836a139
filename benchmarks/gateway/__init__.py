"""The cost of the endpoint picker in front of an Envoy, and its decisions, compared with `kvatlas router`.

envoy.py     a real Envoy with the example's configuration
latency.py   added time and CPU time per request, by how much of an answer the picker follows
workload.py  the demo's workload through both
"""
