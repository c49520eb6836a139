"""What finished requests teach: rates, and how good predictions were."""
