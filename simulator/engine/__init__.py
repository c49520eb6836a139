"""The engine's scheduler, its steps and their duration."""
