"""The contract all parts of kvatlas share: identity, hashing, tiers, events, wire, subjects, fleet, cost, settings."""
