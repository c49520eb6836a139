"""Turns requests into prompts: the fleet's models, request readers, and the parts that look prompts up."""
