"""How much of what an engine tells can be published, and the diagnosis if nearly nothing can."""
