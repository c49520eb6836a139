"""An hour of a fleet with churn: is its memory flat, and is every line in its logs explained?"""
