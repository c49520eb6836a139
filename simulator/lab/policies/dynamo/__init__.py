"""NVIDIA Dynamo's own selection, as it ships it: `policy.py` talks to `selection_process.py`, which runs in Dynamo's Python."""
