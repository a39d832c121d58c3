"""`skyrl-tx keys`: create, list and revoke API keys."""

import argparse
import re
import sys
import time

from sqlmodel import Session

from skyrl_tx.commands.common import CommandError, Record, finish_list_parser, finish_parser, open_database, when
from skyrl_tx.store import keys

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    creating = actions.add_parser(
        "create",
        help="create a key and print it once",
        description="Create a key and print it. Only its digest is stored, so it cannot be printed again. The first "
        "key enables authentication, on loopback too. The first admin key takes over everything created before.",
        allow_abbrev=False,
    )
    creating.add_argument(
        "owner", metavar="OWNER", help="owner of the key; all keys of an owner have access to the same data"
    )
    creating.add_argument("--admin", action="store_true", help="give the key access to the data of all owners")
    creating.add_argument("--name", help="name of the key (default: OWNER)")
    creating.add_argument("--note", default="", help="comment on the key")
    finish_parser(creating, _create)
    listing = actions.add_parser("list", help="show all keys, without their secret part", allow_abbrev=False)
    finish_list_parser(listing, _records, nothing="no keys")
    revoking = actions.add_parser("revoke", help="revoke keys permanently", allow_abbrev=False)
    revoking.add_argument("key_id", nargs="+", type=int, metavar="ID", help="number of a key, as `list` shows it")
    finish_parser(revoking, _revoke)


def _create(arguments: argparse.Namespace) -> None:
    owner: str = arguments.owner
    if not _OWNER.fullmatch(owner):
        raise CommandError(f"owner {owner!r} must be 1 to 64 letters, digits or '.', '_', '@', '+', '-'")
    if owner == keys.LOCAL_OWNER:
        raise CommandError(f"owner {owner!r} is reserved for data created without authentication; choose another name")
    with open_database(arguments, create=True) as store:
        key, row = store.write(
            lambda tx: keys.create(
                tx,
                owner=owner,
                scope="admin" if arguments.admin else "user",
                name=arguments.name or owner,
                note=arguments.note,
                now=time.time(),
            )
        )
    print(key)
    print(f"key {row.key_id} of {row.owner}, scope {row.scope}; it is not shown again", file=sys.stderr)


def _records(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    return [
        {
            "id": row.key_id,
            "key": f"{row.hint}…",
            "owner": row.owner,
            "scope": row.scope,
            "name": row.name,
            "note": row.note or None,
            "made": when(row.created_at),
            "revoked": when(row.revoked_at),
        }
        for row in keys.list_all(tx)
    ]


def _revoke(arguments: argparse.Namespace) -> None:
    with open_database(arguments) as store:
        for key_id in arguments.key_id:
            if not store.write(lambda tx, key_id=key_id: keys.revoke(tx, key_id, time.time())):
                raise CommandError(
                    f"key {key_id}: there is none, or it has been revoked; `skyrl-tx keys list` shows all"
                )
            print(f"revoked key {key_id}")
