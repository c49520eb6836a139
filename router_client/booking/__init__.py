"""Bookings of this router, in the store together with those of all others."""
