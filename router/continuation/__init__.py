"""Continues a streamed answer on another worker after its engine died. Pure: no I/O.

reasons.py          decides which answers can be continued, and why others can't
chunk.py            one event of a stream, as far as a continuation needs it
edits.py            changes some bytes of an event and leaves the others as they are
thoughts.py         reasoning and content as one text
events.py           streams of named events, which are continued as chats:
messages.py         Anthropic's messages
responses.py        OpenAI's responses
chat_events.py      chats, which are continued as completions if their token ids are known
parsed_answer.py    chats with tool calls, whose token ids only an engine's parser can read
generate_events.py  SGLang's `/generate`
rest_request.py     the request for the rest of an answer
usage.py            the usage of the whole answer
rest_builder.py     finds the rest, and builds its requests
sent_answer.py      the part of an answer that the client has
cuts.py             finds the place to cut it
seam.py             appends the rest so that no seam shows
"""
