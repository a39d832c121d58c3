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
    parse_duration_s,
    parse_path,
    record_audit,
)
from skyrl_tx.store import keys
from skyrl_tx.store.errors import SchemaOutdated
from skyrl_tx.store.private_files import open_private
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
        type=parse_duration_s,
        metavar="TIME",
        help="the lifetime of the key, for example 12h or 30d (default: it never expires)",
    )
    creating.add_argument("--name", help="the name of the key (default: OWNER)")
    creating.add_argument("--note", default="", help="a comment on the key")

    creating.add_argument(
        "--first-to",
        type=parse_path,
        metavar="FILE",
        help="create the key only if the server never had one, and write it to a file with mode 0600 instead of "
        "printing it",
    )
    finish_parser(creating, _create)

    # The other actions.
    listing = actions.add_parser("list", help="list all keys without their secret part")
    finish_list_parser(listing, _read_records, nothing="no keys")

    rotating = actions.add_parser(
        "rotate",
        help="replace a key with a new one",
        description="Create a key with the same owner, scope, name, note and lifetime as an existing key, and print "
        "it. The old key expires after --overlap.",
    )
    rotating.add_argument("key_id", type=int, metavar="ID", help="the id of the key, as `skyrl-tx keys list` shows it")
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
        "key_id", nargs="+", type=int, metavar="ID", help="the id of a key, as `skyrl-tx keys list` shows it"
    )
    finish_parser(revoking, _revoke)


def _create(arguments: argparse.Namespace) -> None:
    owner: str = arguments.owner
    if not _OWNER.fullmatch(owner):
        raise CommandError(f"owner {owner!r} must be 1 to 64 letters, digits or '.', '_', '@', '+', '-'")
    if owner == keys.LOCAL_OWNER:
        raise CommandError(f"owner {owner!r} is reserved for data created without authentication; choose another name")
    if arguments.first_to is not None:
        _create_first(arguments, arguments.first_to)
        return
    with open_database(arguments, create=True) as store:
        _print(*store.write(lambda tx: _add_key(tx, arguments)))


def _add_key(tx: Session, arguments: argparse.Namespace) -> tuple[str, ApiKeyRow]:
    now, owner = time.time(), arguments.owner
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
    return key, row


def _create_first(arguments: argparse.Namespace, file: Path) -> None:
    """Create a key and write it to a file, unless the server already had a key."""

    def work(tx: Session) -> bool:
        if keys.has_any(tx):
            return False
        key, _ = _add_key(tx, arguments)
        _write_key(file, key)  # before the commit, so that no key is lost if this process is killed
        return True

    try:
        with open_database(arguments, create=True) as store:
            is_created = store.write(work)
    except SchemaOutdated:
        is_created = False  # an older release wrote the database, so this is not the first start
    print(f"wrote the key to {file}" if is_created else "this is not the first start: no key is created")


def _write_key(file: Path, key: str) -> None:
    temporary = file.with_name(f".{file.name}-{os.getpid()}")
    with open(temporary, "w", opener=open_private) as opened:
        opened.write(f"{key}\n")
        opened.flush()
        os.fsync(opened.fileno())
    temporary.rename(file)


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


def _print(key: str, row: ApiKeyRow) -> None:
    """Print a new key to standard output, and its id, owner, scope and expiry to standard error."""
    expiry = "" if row.expires_at is None else f", expires at {format_time(row.expires_at)}"
    print(key)
    print(f"key {row.key_id} of {row.owner}, scope {row.scope}{expiry}; it cannot be shown again", file=sys.stderr)


def _read_records(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    now = time.time()
    return [
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
