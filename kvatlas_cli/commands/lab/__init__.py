"""Commands of the lab: recording traffic, replaying it, and calibrating costs."""
