"""The command line: one file a command, settings from `kvatlas.settings`, everything else in the packages it calls.

main.py      the entry point: errors become one line on stderr and an exit code
app.py       the commands' names
flags.py     flags made from a settings class
running.py   an event loop that stops cleanly on SIGINT and SIGTERM
output.py    tables and JSON
"""
