"""The command line: one file per command, settings from `kvatlas.settings`, everything else in the packages that it calls.

main.py              the entry point: errors become one line on stderr and an exit code
app.py               the commands by name
flags.py             flags made from a settings class
runner.py            an event loop that stops cleanly on SIGINT and SIGTERM
output.py            tables, JSON, notices
logs.py              log lines on stderr
store_connection.py  the store that a command reads
prompt_query.py      common parts of `overlap` and `route`; token_input.py reads their token ids
ledger_audit.py      `kvatlas audit`: publishers' ledgers against the index
doctor/              `kvatlas doctor`: every check and its findings
commands/            one file per command
"""
