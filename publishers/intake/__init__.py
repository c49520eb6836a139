"""How much of what an engine reports can be published, and the diagnosis if almost nothing can."""
