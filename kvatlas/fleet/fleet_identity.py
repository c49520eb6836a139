"""The fleet that a component belongs to, as components report it over NATS."""

from secrets import token_hex
from typing import Annotated

from pydantic import StringConstraints

from kvatlas.fleet.records import WireRecord
from kvatlas.validation import Text

FleetId = Annotated[str, StringConstraints(pattern="^[0-9a-f]{12}$")]


class FleetIdentity(WireRecord):
    """A fleet, and the store that its indexers write to. `store_name`: human-readable; `member`: the component that reports
    this; `publisher`: that component is a publisher, which knows of no store."""

    fleet: FleetId
    store: Text = ""
    store_name: Text = ""
    member: Text = ""
    publisher: bool = False


def new_fleet_id() -> str:
    """Make the identity of a fleet that is started for the first time."""
    return token_hex(6)
