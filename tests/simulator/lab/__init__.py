"""The lab: replays in virtual time."""
