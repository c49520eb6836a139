"""This router's bookings, which are kept in the store together with those of all other routers."""
