"""Engine-side publishers: what an engine's cache holds, told to the index without a loss that goes unseen."""
