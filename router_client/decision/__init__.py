"""From a prompt to a booked worker."""
