"""Decides which workers are alive, lost or retired, for routers."""
