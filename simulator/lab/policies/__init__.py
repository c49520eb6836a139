"""Ways to choose a worker, from those that gateways ship to an oracle. `catalogue.py` lists them all."""
