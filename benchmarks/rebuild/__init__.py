"""An index that lost everything, until it is complete again."""
