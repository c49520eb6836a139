"""Predicted and actual cached tokens: how we compare them, and where the counts are stored."""
