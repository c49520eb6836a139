"""Changes to the index, for programs that keep a copy of it.

change.py    pure: defines a change, and turns workers' messages into changes that one tenant may see
snapshot.py  the blocks held now, as changes
follow.py    yields a snapshot and then the stream, or the stream from a position on
"""
