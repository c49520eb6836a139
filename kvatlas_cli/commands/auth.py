"""`kvatlas auth`: users of NATS and of the store, with their passwords, permissions and identities; keys of clients."""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from secrets import token_urlsafe
from typing import Annotated

import typer

from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.identities import Identities, parse_identities
from kvatlas.settings.process import DEFAULT_NATS_URL, DEFAULT_REDIS_URL
from kvatlas_cli.auth.nats_users import EVERY_PUBLISHER, Method, inbox_of, nats_permissions, render_nats_users
from kvatlas_cli.auth.redis_users import redis_users, render_acl_file
from kvatlas_cli.auth.secret_files import SecretFolder

KEY_BYTES = 32

auth = typer.Typer(help="Write the users of NATS and Redis, with their permissions.")

OutFlag = Annotated[Path, typer.Option(metavar="PATH", help="Folder for the files; existing users keep their secrets.")]


@auth.command("nats")
def nats(
    out: OutFlag,
    publishers: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="TOML file with a table [publishers.USER] for each publisher: its workers, tenants, models, addresses; "
            "default: one user, `publisher`, for all.",
        ),
    ] = None,
    method: Annotated[Method, typer.Option(help="How users prove who they are.")] = Method.PASSWORD,
    nats_url: Annotated[
        str, typer.Option(help="NATS servers, separated by commas, for the users' URLs.")
    ] = DEFAULT_NATS_URL,
    with_routers: Annotated[
        bool,
        typer.Option("--with-routers", help="Also write a user for routers with --replica; it only reads the stream."),
    ] = False,
) -> None:
    """Write NATS users: each publisher, indexer and auditor, their permissions, and the identities for the indexers."""
    identities = EVERY_PUBLISHER if publishers is None else _read_publishers(publishers)
    users = nats_permissions(identities, with_routers=with_routers)
    folder = SecretFolder(out)
    proofs = _prove(folder, list(users), method, nats_url)
    written = {"nats-users.conf": "include it in nats-server's configuration"}
    folder.write("nats-users.conf", render_nats_users(users, proofs))
    if publishers is not None:
        found = {user: one.model_dump(mode="json", exclude_none=True) for user, one in identities.by_user.items()}
        folder.write("identities.json", json.dumps({"publishers": found}, indent=2) + "\n")
        written["identities.json"] = "kvatlas indexer --identities FILE, and kvatlas doctor"
    for user in users:
        written |= _flags_of(user, method)
    _print(folder, written)
    if method is Method.CERTIFICATE:
        print(f"certificates: name them {', '.join(users)}; nats-server needs verify_and_map: true under tls")


@auth.command("redis")
def redis(
    out: OutFlag,
    redis_url: Annotated[str, typer.Option(help="Redis or Valkey, for the users' URLs.")] = DEFAULT_REDIS_URL,
    with_replicas: Annotated[
        bool, typer.Option("--with-replicas", help="Routers with --replica may copy the whole index.")
    ] = False,
) -> None:
    """Write Redis users: indexer, router and auditor, as an ACL file, and the URL of each."""
    folder = SecretFolder(out)
    users = list(redis_users())
    passwords = folder.passwords(users, "redis-url", redis_url)
    folder.write("users.acl", render_acl_file(passwords, with_replicas=with_replicas))
    written = {"users.acl": "aclfile in the server's configuration"}
    written |= {f"{user}.redis-url": f"--redis-url-file FILE, for {_USED_BY[user]}" for user in users}
    _print(folder, written)


@auth.command("key")
def key(
    name: Annotated[str, typer.Argument(help="The client's name, for logs and limits.")],
    tenant: Annotated[str, typer.Option(help="The tenant whose prompts it sends; default: its name.")] = "",
) -> None:
    """Make a key for a client of the router, and print the lines that the router's --clients-file needs, with the key's
    hash."""
    made = f"kva-{token_urlsafe(KEY_BYTES)}"
    print(f"# the client's key, shown only now: {made}")
    print(f"[clients.{name}]")
    print(f'keys = ["sha256:{sha256(made.encode()).hexdigest()}"]')
    print(f"tenants = [{json.dumps(tenant or name)}]")


_USED_BY = {
    "indexer": "kvatlas indexer",
    "router": "kvatlas router and your own routers, route",
    "auditor": "kvatlas doctor, audit, workers, export, overlap, rates",
}


def _prove(folder: SecretFolder, users: Sequence[str], method: Method, nats_url: str) -> Mapping[str, str]:
    """The text that precedes each user's permissions. Also writes the secrets."""
    if method is Method.CERTIFICATE:
        return {user: f"user: {user}" for user in users}
    if method is Method.NKEY:
        import nkeys  # needs the extra

        def new_seed() -> str:
            return str(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode())

        seeds = {user: folder.keep(f"{user}.nkey", new_seed) for user in users}
        return {
            user: f"nkey: {nkeys.from_seed(bytearray(seed.encode())).public_key.decode()}"
            for user, seed in seeds.items()
        }
    import bcrypt  # needs the extra

    passwords = folder.passwords(list(users), "nats-url", nats_url)
    # random 192-bit passwords need no slow hash; older servers know only the prefix 2a
    hashes = {
        user: bcrypt.hashpw(password.encode(), bcrypt.gensalt(4, b"2a")).decode()
        for user, password in passwords.items()
    }
    return {user: f'user: {user}, password: "{hashes[user]}"' for user in users}


def _flags_of(user: str, method: Method) -> dict[str, str]:
    """The user's file, and the flags for a process that runs as this user."""
    who = f"for {user}"
    match method:
        case Method.PASSWORD:
            return {f"{user}.nats-url": f"--nats-url-file FILE, {who}"}
        case Method.NKEY:
            return {f"{user}.nkey": f"--nats-nkey-file FILE --nats-inbox {inbox_of(user)}, {who}"}
        case Method.CERTIFICATE:
            return {f"({user})": f"--nats-cert-file FILE --nats-key-file FILE --nats-inbox {inbox_of(user)}, {who}"}


def _read_publishers(file: Path) -> Identities:
    try:
        return parse_identities(tomllib.loads(file.read_text()))
    except OSError as error:
        raise SettingsError(f"--publishers: can't read {str(file)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, InvalidValue) as error:
        raise SettingsError(f"--publishers is {str(file)!r}: {error}") from error


def _print(folder: SecretFolder, written: Mapping[str, str]) -> None:
    width = max(map(len, written))
    print(f"in {folder.folder}:")
    for name, use in written.items():
        print(f"  {name:{width}}  {use}")
