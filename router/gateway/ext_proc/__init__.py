"""Envoy's external processing, as an endpoint picker speaks it: no I/O.

ext_proc.proto    the messages; ext_proc_pb2.py is made of it
messages.py       reads and builds them
stream_state.py   what may be sent when, on one stream
"""
