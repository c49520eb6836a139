"""Bookings of this router, in the store with all others."""
