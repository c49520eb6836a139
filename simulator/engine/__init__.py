"""Scheduler, steps and their time."""
