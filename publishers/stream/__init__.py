"""From index events to acknowledged messages in JetStream."""
