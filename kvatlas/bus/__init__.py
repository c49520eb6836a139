"""NATS: the connection, the event stream, the subjects, and the messages and requests that they carry."""
