"""An hour of a fleet with churn: its memory must stay flat, and every line in its logs must be explained."""
