"""Faults that a person on call meets: what doctor, alerts, status pages and logs say of each, and that all is green again after."""
