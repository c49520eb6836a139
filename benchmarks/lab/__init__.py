"""The measured comparison of policies: `make lab` writes docs/results.md."""
