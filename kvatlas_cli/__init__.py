"""The command line: one file a command, settings from `kvatlas.settings`, everything else in the packages it calls.

main.py              the entry point: errors become one line on stderr and an exit code
app.py               the commands by name
flags.py             flags made from a settings class
runner.py            an event loop that stops cleanly on SIGINT and SIGTERM
output.py            tables, JSON, notices
logs.py              log lines on stderr
store_connection.py  the store that a command reads
prompt_query.py      what `overlap` and `route` share; token_input.py reads their token ids
ledger_audit.py      `kvatlas audit`: publishers' ledgers against the index
doctor/              `kvatlas doctor`: every check and its findings
commands/            one file a command
"""
