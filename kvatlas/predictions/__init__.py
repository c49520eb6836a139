"""Predicted and real cached tokens: how they are compared, and where the counts are stored."""
