"""Goes on with a streamed answer on another worker after its engine died. Pure: no I/O.

reasons.py       which answers can go on, and why others can't
chunk.py         one event of OpenAI's streams, as far as a continuation needs it
edits.py         changes in an event's bytes that leave all others as they are
messages.py      Anthropic's messages, which go on as chats
rest_request.py  the request for the rest of an answer
usage.py         the usage of the whole answer
seam.py          what the client has of an answer, and the events that follow it without a seam
"""
