"""Which workers are alive, lost or retired, as routers see them."""
