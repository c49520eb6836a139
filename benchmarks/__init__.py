"""Every budget, measured in one run on one machine: `make bench`."""
