"""Rates learned from finished requests, and the accuracy of predictions."""
