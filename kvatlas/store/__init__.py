"""Redis or Valkey: the connection, and server-side functions."""
