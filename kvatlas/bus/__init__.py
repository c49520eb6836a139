"""NATS: the connection, the event stream, subjects, and what passes on them."""
