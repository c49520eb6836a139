"""This router's bookings, in the store together with those of all others."""
