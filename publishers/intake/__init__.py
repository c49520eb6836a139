"""The share of an engine's reported blocks that can be published, and the diagnosis if that is almost none of them."""
