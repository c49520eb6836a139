"""What engines answer, as it is read on its way.

event_parser.py   pure: server-sent events as the standard defines them, out of pieces
event_stream.py   content, usage, error and end of a stream, and which of its bytes may pass
engine_errors.py  errors in answers of status 200
"""
