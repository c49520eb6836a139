-- Rules for the functions that run in the store (Lua 5.1). `make lint` checks each library as the server compiles it: see
-- tests/lua_lint.py.
std = 'lua51'
max_line_length = 128
read_globals = { 'redis', 'cmsgpack', 'struct', 'bit' }
