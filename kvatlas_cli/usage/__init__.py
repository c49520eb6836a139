"""`kvatlas usage`: the memory that each tenant's blocks took up, and what they saved.

rows.py      what each tenant, adapter and program used, and the export formats
command.py   the command
"""
