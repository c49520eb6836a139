"""NATS: the connection, the event stream, subjects, and the messages and requests on them."""
