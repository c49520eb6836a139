"""Sends index events to JetStream as acknowledged messages."""
