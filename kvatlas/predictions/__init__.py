"""Predicted and real cached tokens: how we compare them, and where the counts are stored."""
