"""`kvatlas top`: the fleet live in a terminal.

sample.py    reads the fleet: workers, indexers, routers' counts
screen.py    renders one screen of text (pure)
terminal.py  the terminal: keys in, screens out
"""
