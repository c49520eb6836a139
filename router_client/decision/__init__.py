"""From a prompt to a booked worker, whatever the store does."""
