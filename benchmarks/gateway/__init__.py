"""What the endpoint picker costs in front of an Envoy, and what it decides, beside `kvatlas router`.

envoy.py     a real Envoy with the example's configuration
latency.py   time added and processor time a request, by how much of an answer the picker follows
workload.py  the demo's workload through both
"""
