"""NVIDIA Dynamo's own selection as shipped: `policy.py` talks to `selection_process.py`, which runs in Dynamo's Python."""
