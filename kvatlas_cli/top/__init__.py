"""`kvatlas top`: the fleet live in a terminal.

sample.py    reads the fleet: workers, indexers, routers' counts
screen.py    one screen of text of it (pure)
terminal.py  the terminal: keys in, screens out
"""
