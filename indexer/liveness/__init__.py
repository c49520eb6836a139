"""Decides for routers which workers are alive, lost or retired."""
