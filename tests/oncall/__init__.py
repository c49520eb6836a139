"""Faults that a person on call meets: what doctor, alerts, pages and logs say of each, and that all is green after it."""
