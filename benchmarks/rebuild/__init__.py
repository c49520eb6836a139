"""The rebuild of an index that lost everything."""
