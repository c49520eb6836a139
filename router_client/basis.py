"""The basis of a choice."""

from enum import StrEnum


class Basis(StrEnum):
    """The basis of a choice.

    `COST`: overlap, cost and load. `LOAD`: load alone, because the index did not answer or is switched off. `PREFIX_HASH`:
    a hash of the prompt's start, because the load was not known either. `POLICY`: another policy, in shadow mode.
    """

    COST = "cost"
    LOAD = "load"
    PREFIX_HASH = "prefix_hash"
    POLICY = "policy"
