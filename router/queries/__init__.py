"""Read-only queries of the index for other routers, in the formats that they know. They ask which workers hold a
prompt."""
