"""Changes of the index for those who keep a copy of it.

change.py    what a change is, and the messages of workers as changes that one tenant may see (pure)
snapshot.py  what is held now, as changes
follow.py    a snapshot, then the stream; or the stream from a position on
"""
