"""Changes of the index, for programs that keep a copy of it.

change.py    pure: what a change is, and how workers' messages become changes that one tenant may see
snapshot.py  the blocks held now, as changes
follow.py    a snapshot and then the stream, or the stream from a position
"""
