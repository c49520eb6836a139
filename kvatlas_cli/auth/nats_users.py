"""NATS users: each publisher, the indexers, the routers and the auditor (`doctor`, `audit`), with the subjects that each
may use.

A router uses NATS only for a local copy of the index (`--replica`), and to ask for engines' block hashes. Every user has its
own inboxes, so no user can read another's replies.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvatlas.bus.access import DEFAULT_INBOX
from kvatlas.bus.subjects import (
    ALL_ALIVE,
    ALL_CONTROL,
    ALL_DEAD,
    ALL_EVENTS,
    ALL_FLEETS,
    ALL_GRANTS,
    ALL_HASHES,
    ALL_STORE_NOTICES,
    DEAD_STREAM,
    STREAM,
    alive_subject,
    control_subject,
    events_of_worker,
    grants_of_worker,
    hashes_subject,
    notices_of_writer,
    notices_to_store,
)
from kvatlas.errors import InvalidValue
from kvatlas.fleet.identities import Identities, Identity

INDEXER, ROUTER, AUDITOR = "indexer", "router", "auditor"
EVERY_PUBLISHER = Identities({"publisher": Identity(workers=("*",))})
"""A single user for all publishers, each of which may speak for every worker."""


class Method(StrEnum):
    """How a user proves its identity: a password (the server has its bcrypt hash), an NKey (the server has the public
    half), or a certificate (the server has `verify_and_map`; the user's name is one of those in the certificate)."""

    PASSWORD = "password"  # noqa: S105  # the name of a method
    NKEY = "nkey"
    CERTIFICATE = "certificate"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish to and subscribe to. `denied`: exceptions to both. `responds`: the user may
    answer each request once."""

    publish: Sequence[str]
    subscribe: Sequence[str]
    denied: Sequence[str] = ()
    responds: bool = False

    def render(self) -> str:
        """The permissions in the syntax of nats-server's configuration."""
        denied = f" deny: {_list(self.denied)}" if self.denied else ""
        lines = [
            f"publish: {{ allow: {_list(self.publish)}{denied} }}",
            f"subscribe: {{ allow: {_list(self.subscribe)}{denied} }}",
            *(["allow_responses: true"] if self.responds else []),
        ]
        return "\n".join(lines)


def inbox_of(user: str) -> str:
    """The prefix of a user's inboxes."""
    return f"{DEFAULT_INBOX}.{user}"


def nats_permissions(identities: Identities = EVERY_PUBLISHER, *, with_routers: bool = False) -> dict[str, Permissions]:
    """The permissions of each user, by name. `with_routers`: include a user for routers that keep a local copy (they read the
    stream) or whose engines fetch by hashes. Raises InvalidValue for a publisher that has the name of another user."""
    for taken in (INDEXER, ROUTER, AUDITOR):
        if taken in identities.by_user:
            raise InvalidValue(
                f"publisher {taken}: this name is reserved for kvatlas' own NATS user; choose another one"
            )
    api = "$JS.API"
    streams = [f"{api}.STREAM.{call}.{name}" for name in (STREAM, DEAD_STREAM) for call in ("INFO", "CREATE")]
    consumers = [f"{api}.CONSUMER.{call}.{STREAM}.>" for call in ("CREATE", "DELETE", "MSG.NEXT")]
    update = f"{api}.STREAM.UPDATE.{STREAM}"
    own_inbox = {user: f"{inbox_of(user)}.>" for user in (*identities.by_user, INDEXER, ROUTER, AUDITOR)}
    users = {
        INDEXER: Permissions(
            publish=[ALL_CONTROL, ALL_DEAD, ALL_FLEETS, *streams, update, *consumers, own_inbox[INDEXER]],
            subscribe=[ALL_ALIVE, ALL_GRANTS, ALL_FLEETS, own_inbox[INDEXER]],
            responds=True,
        ),
        AUDITOR: Permissions(
            publish=[
                ALL_CONTROL,
                *(f"{api}.STREAM.INFO.{name}" for name in (STREAM, DEAD_STREAM)),
                f"{api}.STREAM.MSG.GET.{DEAD_STREAM}",
            ],
            subscribe=[ALL_ALIVE, own_inbox[AUDITOR]],
        ),
    }
    if with_routers:
        users[ROUTER] = Permissions(
            publish=[
                *(f"{api}.STREAM.{call}.{STREAM}" for call in ("INFO", "MSG.GET")),
                *consumers,
                f"{api}.CONSUMER.INFO.{STREAM}.*",
                ALL_HASHES,
            ],
            subscribe=[own_inbox[ROUTER]],
        )
    for user, identity in identities.by_user.items():
        workers = identity.worker_ids()
        others = [] if identity.names_workers else identities.named_workers
        users[user] = Permissions(
            publish=[
                *(
                    _subjects(workers, events_of_worker, alive_subject, grants_of_worker, notices_of_writer)
                    or [ALL_EVENTS, ALL_ALIVE, ALL_GRANTS, ALL_STORE_NOTICES]
                ),
                ALL_FLEETS,
            ],
            subscribe=[
                *(
                    _subjects(workers, control_subject, hashes_subject, alive_subject, notices_to_store)
                    or [ALL_CONTROL, ALL_HASHES, ALL_ALIVE, ALL_STORE_NOTICES]
                ),
                own_inbox[user],
            ],
            denied=_subjects(
                others,
                events_of_worker,
                alive_subject,
                control_subject,
                hashes_subject,
                grants_of_worker,
                notices_of_writer,
                notices_to_store,
            ),
            responds=True,
        )
    return users


def render_nats_users(users: Mapping[str, Permissions], proofs: Mapping[str, str]) -> str:
    """The `authorization` block of the configuration. `proofs`: the text that precedes each user's permissions,
    including its name or key."""
    lines = [
        "# Written by `kvatlas auth nats`; include it in nats-server's configuration.",
        "authorization {",
        "  users = [",
    ]
    for user, permissions in users.items():
        indented = "\n".join(f"        {line}" for line in permissions.render().splitlines())
        lines += [f"    {{ {proofs[user]}", "      permissions: {", indented, "      }", "    }"]
    return "\n".join([*lines, "  ]", "}", ""])


def _subjects(workers: Iterable[str], *of: Callable[[str], str]) -> list[str]:
    return [subject(worker) for worker in workers for subject in of]


def _list(subjects: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"
