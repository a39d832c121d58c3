"""`skyrl-tx keys`: who may use a server."""

import argparse
import re
import sys
import time

from skyrl_tx.commands.place import CommandError, add_data_dir, opened
from skyrl_tx.commands.table import Record, show, when
from skyrl_tx.store import keys
from skyrl_tx.store.tables import ApiKeyRow

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    making = actions.add_parser(
        "create",
        help="make a key, and show it this once",
        description="Make a key and print it; only a digest is kept, so it cannot be shown again. Once there is a "
        "key, the server asks for one, on loopback too. The first admin key adopts what was made before.",
        allow_abbrev=False,
    )
    making.add_argument("owner", metavar="OWNER", help="whose key it is; keys of one owner see the same things")
    making.add_argument("--admin", action="store_true", help="the key sees, and may change, what is anyone's")
    making.add_argument("--name", help="what to call this key (default: the owner)")
    making.add_argument("--note", default="", help="what to remember of it")
    add_data_dir(making)
    making.set_defaults(run=_create)
    listing = actions.add_parser("list", help="show all keys, without what opens anything", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print JSON")
    add_data_dir(listing)
    listing.set_defaults(run=_list)
    ending = actions.add_parser("revoke", help="end keys, for ever", allow_abbrev=False)
    ending.add_argument("key_id", nargs="+", type=int, metavar="ID", help="number of a key, as `list` shows it")
    add_data_dir(ending)
    ending.set_defaults(run=_revoke)


def _create(arguments: argparse.Namespace) -> int:
    owner: str = arguments.owner
    if not _OWNER.fullmatch(owner):
        raise CommandError(f"owner {owner!r} must be 1 to 64 letters, digits or '.', '_', '@', '+', '-'")
    if owner == keys.LOCAL_OWNER:
        raise CommandError(f"owner {owner!r} stands for everyone while no keys are asked for; take another name")
    with opened(arguments, create=True) as store:
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
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with opened(arguments) as store:
        records = [_record(row) for row in store.read(keys.list_all)]
    show(records, as_json=arguments.json, nothing="no keys")
    return 0


def _record(row: ApiKeyRow) -> Record:
    return {
        "id": row.key_id,
        "key": f"{row.hint}…",
        "owner": row.owner,
        "scope": row.scope,
        "name": row.name,
        "note": row.note or None,
        "made": when(row.created_at),
        "revoked": when(row.revoked_at),
    }


def _revoke(arguments: argparse.Namespace) -> int:
    key_ids: list[int] = arguments.key_id
    with opened(arguments) as store:
        for key_id in key_ids:
            if not store.write(lambda tx, key_id=key_id: keys.revoke(tx, key_id, time.time())):
                raise CommandError(
                    f"key {key_id}: there is none, or it has been revoked; `skyrl-tx keys list` shows all"
                )
            print(f"revoked key {key_id}")
    return 0
