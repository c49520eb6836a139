"""Ways to choose a worker, from what gateways ship to an oracle. `catalogue.py` names them all."""
