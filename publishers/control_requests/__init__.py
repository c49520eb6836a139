"""Requests that other processes send to a publisher over NATS."""
