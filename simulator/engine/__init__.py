"""Scheduler, steps and their duration."""
