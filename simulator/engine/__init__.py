"""Scheduler, steps and how long they take."""
