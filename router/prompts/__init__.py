"""Turns requests into prompts: the fleet's models, readers of requests, and the parts that look prompts up."""
