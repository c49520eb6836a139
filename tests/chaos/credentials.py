"""The users of the fleet's NATS: one for a rogue publisher, and one for everything else, which may do everything."""

import json

from kvatlas.fleet.identities import Identities, Identity
from kvatlas_cli.auth.nats_users import nats_permissions

ROGUE = "rogue"
"""The rogue's user, tenant and only worker."""
PASSWORD = "chaos"
IDENTITIES = Identities(
    {"engines": Identity(workers=("*",)), ROGUE: Identity(workers=(ROGUE,), tenants=(ROGUE,), addresses=("127.0.0.1",))}
)


def nats_config() -> str:
    """The configuration of nats-server: clients that don't log in are the fleet's own user."""
    permissions = nats_permissions(IDENTITIES)[ROGUE].render()
    users = f"""authorization {{ users = [
  {{ user: fleet, password: {PASSWORD} }}
  {{ user: {ROGUE}, password: {PASSWORD}, permissions: {{ {permissions} }} }}
] }}"""
    return f"{users}\nno_auth_user: fleet"


def identities_file() -> str:
    """The file for `kvatlas indexer --identities`."""
    return json.dumps(
        {"publishers": {user: one.model_dump(exclude_none=True) for user, one in IDENTITIES.by_user.items()}}
    )
