"""`kvatlas usage`: the memory that each tenant's blocks took, and what they saved.

rows.py      who used what, and the export formats
command.py   the command
"""
