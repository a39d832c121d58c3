"""`skyrl-tx keys`: create, list, rotate and revoke API keys."""

import argparse
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import get_args

from sqlmodel import Session

from skyrl_tx.contract.errors import UserError
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import (
    Record,
    finish_list_parser,
    finish_parser,
    format_time,
    open_database,
    parse_count,
    parse_duration_s,
    parse_path,
    record_audit,
)
from skyrl_tx.process.paths import open_private
from skyrl_tx.store import SchemaOutdated, keys
from skyrl_tx.store.tables import ApiKeyRow, KeyScope

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    creating = actions.add_parser(
        "create",
        help="create a key and print it once",
        description="Create a key and print it. The database stores only a digest, so the key cannot be shown again. "
        "From the first key on, the server requires a key for every request, also on loopback. The owner of the first "
        "admin key takes over all data that was created without keys.",
    )
    creating.add_argument(
        "owner", metavar="OWNER", help="the owner of the key; all keys of an owner have access to the same data"
    )

    scope = creating.add_mutually_exclusive_group()
    scope.add_argument(
        "--scope",
        choices=get_args(KeyScope),
        default="user",
        help="what the key allows. admin: all requests, on the data of all owners; user: all requests except "
        "administration, on the owner's data; sample: only sampling; read: only lists, descriptions and downloads; "
        "metrics: only the metrics (default: user)",
    )
    scope.add_argument("--admin", action="store_const", dest="scope", const="admin", help="same as --scope admin")

    creating.add_argument(
        "--expires-in",
        type=_parse_lifetime_s,
        metavar="TIME",
        help="the lifetime of the key, for example 12h or 30d (default: it never expires)",
    )
    creating.add_argument("--name", help="the name of the key (default: OWNER)")
    creating.add_argument("--note", default="", help="a comment on the key")
    creating.add_argument(
        "--if-none",
        action="store_true",
        help="create the key only if there was never a key of this scope, for example when a container starts",
    )
    creating.add_argument(
        "--output",
        type=parse_path,
        metavar="FILE",
        help="write the key to FILE, which only you can read, instead of printing it",
    )
    finish_parser(creating, _create)

    listing = actions.add_parser("list", help="list all keys without their secret part")
    finish_list_parser(listing, _read_records, nothing="no keys")

    rotating = actions.add_parser(
        "rotate",
        help="replace a key with a new one",
        description="Create a key with the same owner, scope, name, note and lifetime as an existing key, and print "
        "it. The old key expires after --overlap.",
    )
    rotating.add_argument(
        "key_id", type=parse_count, metavar="ID", help="the id of the key, as `skyrl-tx keys list` shows it"
    )
    rotating.add_argument(
        "--overlap",
        type=parse_duration_s,
        default=86_400.0,
        metavar="TIME",
        help="how long the old key stays valid, for example 2h (default: 24h)",
    )
    finish_parser(rotating, _rotate)

    revoking = actions.add_parser("revoke", help="revoke keys permanently")
    revoking.add_argument(
        "key_id", nargs="+", type=parse_count, metavar="ID", help="the id of a key, as `skyrl-tx keys list` shows it"
    )
    finish_parser(revoking, _revoke)


def _parse_lifetime_s(text: str) -> float:
    """Convert a duration to seconds. Raises ArgumentTypeError if it is no duration, or 0."""
    seconds = parse_duration_s(text)
    if not seconds:
        raise argparse.ArgumentTypeError("must be more than 0 s")
    return seconds


def _create(arguments: argparse.Namespace) -> None:
    owner: str = arguments.owner
    if not _OWNER.fullmatch(owner):
        raise CommandError(f"owner {owner!r} must be 1 to 64 letters, digits or '.', '_', '@', '+', '-'")
    if owner == keys.LOCAL_OWNER:
        raise CommandError(f"owner {owner!r} is reserved for data created without authentication; choose another name")
    now = time.time()

    def work(tx: Session) -> tuple[str, ApiKeyRow] | None:
        if arguments.if_none and any(row.scope == arguments.scope for row in keys.list_all(tx)):
            return None
        key, row = keys.create(
            tx,
            owner=owner,
            scope=arguments.scope,
            name=arguments.name or owner,
            note=arguments.note,
            now=now,
            expires_at=None if arguments.expires_in is None else now + arguments.expires_in,
        )
        record_audit(tx, "organization_key_created", key=row.key_id, owner=owner, scope=row.scope)
        # Write the file before the commit: after a crash in between, the key in the file is invalid. After the commit,
        # a crash could leave a valid key that nobody knows.
        if arguments.output is not None:
            _write(arguments.output, key)
        return key, row

    try:
        with open_database(arguments, create=True) as store:
            created = store.write(work)
    except SchemaOutdated:
        if not arguments.if_none:
            raise
        created = None  # an older release wrote the database, so this is not the first start
    if created is None:
        print(
            f"no key created: there was a key of scope {arguments.scope} before. If it is lost or revoked, run "
            f"`skyrl-tx keys create` without --if-none",
            file=sys.stderr,
        )
        return
    _print(*created, output=arguments.output)


def _write(path: Path, key: str) -> None:
    """Replace a file with a key that only this user can read. Raises CommandError if that fails."""
    partial_file = path.with_name(f"{path.name}.partial")
    try:
        with open(partial_file, "w", opener=open_private) as file:
            file.write(f"{key}\n")
            file.flush()
            os.fsync(file.fileno())
        partial_file.rename(path)
    except OSError as error:
        raise CommandError(f"--output {path}: {error.strerror}; no key was created") from error


def _rotate(arguments: argparse.Namespace) -> None:
    now = time.time()

    def work(tx: Session) -> tuple[str, ApiKeyRow]:
        key, row = keys.rotate(tx, arguments.key_id, overlap_s=arguments.overlap, now=now)
        record_audit(tx, "organization_key_rotated", key=arguments.key_id, owner=row.owner, replaced_by=row.key_id)
        return key, row

    with open_database(arguments) as store:
        try:
            key, row = store.write(work)
        except UserError as error:
            raise CommandError(f"{error}; `skyrl-tx keys list` shows all keys") from error
    _print(key, row)
    print(f"key {arguments.key_id} expires at {format_time(now + arguments.overlap)} at the latest", file=sys.stderr)


def _print(key: str, row: ApiKeyRow, *, output: Path | None = None) -> None:
    """Print a new key to standard output, and its id, owner, scope and expiry to standard error.

    A key that was written to the file `output` is not printed.
    """
    expiry = "" if row.expires_at is None else f", expires at {format_time(row.expires_at)}"
    if output is None:
        print(key)
        sys.stdout.flush()  # before the next line in a container's log
    where = "it cannot be shown again" if output is None else f"written to {output}"
    print(f"key {row.key_id} of {row.owner}, scope {row.scope}{expiry}; {where}", file=sys.stderr)


def _read_records(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    now = time.time()
    return [
        # One record per key, and revoked keys stay.
        {
            "id": row.key_id,
            "key": f"{row.hint}…",
            "owner": row.owner,
            "scope": row.scope,
            "name": row.name,
            "note": row.note or None,
            "status": keys.get_status(row, now),
            "made": format_time(row.created_at),
            "last_used": format_time(row.last_used_at),
            "expires": format_time(row.expires_at),
            "revoked": format_time(row.revoked_at),
        }
        for row in keys.list_all(tx)
    ]


def _revoke_one(tx: Session, key_id: int) -> bool:
    row = keys.get(tx, key_id)
    if row is None or not keys.revoke(tx, key_id, time.time()):
        return False
    record_audit(tx, "organization_key_revoked", key=key_id, owner=row.owner)
    return True


def _revoke(arguments: argparse.Namespace) -> None:
    with open_database(arguments) as store:
        for key_id in arguments.key_id:
            if not store.write(partial(_revoke_one, key_id=key_id)):
                raise CommandError(
                    f"key {key_id} does not exist or is already revoked; `skyrl-tx keys list` shows all keys"
                )
            print(f"revoked key {key_id}")
        if not any(row.scope == "admin" for row in store.read(lambda tx: keys.list_usable(tx, time.time()))):
            print("there is no valid admin key now; create one with `skyrl-tx keys create OWNER --admin`")
