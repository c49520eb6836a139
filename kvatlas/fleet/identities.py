"""Publishers' identities: the workers, tenants, models and addresses that each publisher may speak for. `kvatlas auth nats`
writes them, and indexers read them.

NATS proves who the sender is: a publisher's user may publish only to the subjects of its own workers. The last token of the
subject, a worker's id, therefore leads to the identity that applies.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvatlas.addresses import AddressList, host_and_port
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.records import EngineEndpoint
from kvatlas.fleet.tenants import include
from kvatlas.identity import Scope, check_worker_id
from kvatlas.validation import MAX_TENANTS, Text, describe_mistake, matches

log = logging.getLogger("kvatlas.identities")

ANY = "*"
MAX_WORKERS = 4_096
"""Maximum number of workers per publisher: each needs three subjects in the permissions."""
_RANGE = re.compile(r"\{(\d{1,6})\.\.(\d{1,6})\}")
_USER = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _check_addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    AddressList.parse(value)
    return value


class TenantRefused(InvalidValue):
    """A publisher may not speak for a tenant. The line does not name the tenant, because such lines end up in logs."""

    def __init__(self, line: str, tenant_id: str) -> None:
        super().__init__(line)
        self.tenant_id = tenant_id


class Identity(BaseModel):
    """What one publisher's user may speak for.

    `workers`: ids, ranges (`vllm-{0..15}`, `engine-dp{0..7}`), or just `*` for every worker that no other publisher lists.
    `tenants`, `models`: names, in which `*` stands for any text. `addresses`: the addresses of its engines (`AddressList`); if
    there are none, it may advertise any address, but routers send requests only to private ones. `blocks`: the maximum number
    of blocks of each worker in the index, over all tiers; None: as many as fit in the store.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    workers: tuple[str, ...] = Field(min_length=1)
    tenants: tuple[Text, ...] = Field(default=(ANY,), max_length=MAX_TENANTS)
    models: tuple[str, ...] = (ANY,)
    addresses: Annotated[tuple[str, ...], AfterValidator(_check_addresses)] = ()
    blocks: int | None = Field(default=None, ge=1)

    @property
    def names_workers(self) -> bool:
        return self.workers != (ANY,)

    def worker_ids(self) -> list[str]:
        """Every worker that the identity lists; empty for `*`. Raises InvalidValue."""
        if not self.names_workers:
            return []
        found = list(islice((name for text in self.workers for name in _expand(text)), MAX_WORKERS + 1))
        if len(found) > MAX_WORKERS:
            raise InvalidValue(f"more than {MAX_WORKERS} workers; split them among several publishers")
        return [check_worker_id(name) for name in found]


class Identities:
    """The identities of a fleet's publishers, by user. A worker that no publisher lists is refused."""

    def __init__(self, by_user: Mapping[str, Identity]) -> None:
        """Raises InvalidValue for a worker that two publishers list, or for an invalid user name."""
        self.by_user = dict(by_user)
        self._user_of: dict[str, str] = {}
        self._others: str | None = None
        for user, identity in self.by_user.items():
            if not _USER.fullmatch(user):
                raise InvalidValue(f"publisher {user!r:.80}; expected 1 to 64 characters from A-Z a-z 0-9 _ -")
            if not identity.names_workers:
                if self._others is not None:
                    raise InvalidValue(
                        f"publishers {self._others} and {user} both publish for all workers; only one may"
                    )
                self._others = user
            for worker_id in identity.worker_ids():
                other = self._user_of.setdefault(worker_id, user)
                if other != user:
                    raise InvalidValue(
                        f"publishers {other} and {user} both claim worker {worker_id}; a worker may belong to only one"
                    )
        self._addresses = {user: AddressList.parse(one.addresses) for user, one in self.by_user.items()}

    @property
    def named_workers(self) -> list[str]:
        """The workers that publishers list, sorted."""
        return sorted(self._user_of)

    def check_scope(self, worker_id: str, scope: Scope) -> None:
        """Check that the publisher may speak for the scope. Raises InvalidValue with a one-line message: TenantRefused if the
        tenant is the reason."""
        user, identity = self._of(worker_id)
        refusal = f"worker {worker_id}: publisher {user} may not speak for"
        if not matches(scope.model_id, identity.models):
            raise InvalidValue(f"{refusal} model {scope.model_id!r:.80}")
        if not include(identity.tenants, scope.tenant_id):
            log.debug("%s tenant %.80r", refusal, scope.tenant_id)
            raise TenantRefused(f"{refusal} its tenant", scope.tenant_id)

    def check_endpoint(self, endpoint: EngineEndpoint) -> None:
        """Check that the worker's publisher may advertise the model, tenant and address. Raises InvalidValue with a one-line
        message."""
        self.check_scope(endpoint.id, Scope(endpoint.model_id, endpoint.tokenizer_id, None, endpoint.tenant_id))
        address = endpoint.advertised_url or endpoint.base_url
        if not address:
            return
        user, identity = self._of(endpoint.id)
        host, port = host_and_port(address)
        if identity.addresses and not self._addresses[user].allows(host, port):
            raise InvalidValue(f"worker {endpoint.id}: publisher {user} may not advertise {host}:{port}")

    def most_blocks(self, worker_id: str) -> int | None:
        """How many blocks the worker may have in the index; None: there is no limit."""
        user = self._user_of.get(worker_id, self._others)
        return None if user is None else self.by_user[user].blocks

    def vouches(self, worker_id: str) -> bool:
        """True if an identity lists the addresses that the worker may use."""
        user = self._user_of.get(worker_id, self._others)
        return user is not None and bool(self.by_user[user].addresses)

    def tenants_of(self, worker_id: str) -> tuple[str, ...]:
        """The tenants whose prompts the worker may get (`FleetRecord.tenants`)."""
        user = self._user_of.get(worker_id, self._others)
        tenants = () if user is None else self.by_user[user].tenants
        return () if ANY in tenants else tenants

    def _of(self, worker_id: str) -> tuple[str, Identity]:
        user = self._user_of.get(worker_id, self._others)
        if user is None:
            raise InvalidValue(f"worker {worker_id}: no publisher may speak for it")
        return user, self.by_user[user]


def load_identities(file: Path, flag: str) -> Identities:
    """The identities in a file that `kvatlas auth nats` wrote. Raises SettingsError, naming `flag`."""
    try:
        return parse_identities(json.loads(file.read_text()))
    except OSError as error:
        raise SettingsError(f"{flag}: can't read {str(file)!r}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{flag} is {str(file)!r}: {error}") from error


def parse_identities(found: object) -> Identities:
    """Identities from `{"publishers": {user: {"workers": [...], ...}}}`. Raises InvalidValue, naming the field."""
    publishers = found.get("publishers") if isinstance(found, dict) else None
    if not isinstance(publishers, dict) or not publishers:
        raise InvalidValue("publishers is missing; expected a table with one entry for each publisher")
    by_user: dict[str, Identity] = {}
    for user, fields in publishers.items():
        try:
            by_user[str(user)] = Identity.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in ("publishers", user, *first["loc"]))
            raise InvalidValue(describe_mistake(where, first)) from error
    return Identities(by_user)


def _expand(text: str) -> Iterator[str]:
    """The names that an entry stands for: every name in its ranges, or just the entry itself."""
    found = _RANGE.search(text)
    if found is None:
        yield text
        return
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise InvalidValue(f"workers {text!r:.80}: the range is empty")
    for number in range(first, last + 1):
        yield from _expand(f"{text[: found.start()]}{number}{text[found.end() :]}")
