"""What a request costs on each worker."""
