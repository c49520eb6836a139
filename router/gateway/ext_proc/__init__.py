"""Envoy's external processing protocol from an endpoint picker's side. No I/O.

ext_proc.proto    the messages; ext_proc_pb2.py is generated from it
messages.py       reads and builds them
stream_state.py   which messages may be sent on a stream, and when
"""
