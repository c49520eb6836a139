"""Faults that a person on call meets: what doctor, alerts, pages and logs say about each, and that everything is green
afterwards."""
