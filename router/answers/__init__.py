"""Reads engines' answers while they pass through.

event_parser.py   pure: parses server-sent events, as defined by the standard, from a stream's pieces
event_stream.py   finds a stream's content, usage, error and end, and decides which bytes may pass
engine_errors.py  errors inside answers with status 200
error_events.py   reports the router's own errors in a stream that has begun
"""
