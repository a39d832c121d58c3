"""`skyrl-tx quotas`: list, set and remove quotas, and the weights that divide device time between owners."""

import argparse
import sys
import time
from typing import get_args

from sqlmodel import Session

from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.admission import read_quota_uses
from skyrl_tx.apps.teams.quotas import ANY, DAY_LIMITS, LIMITS, WEIGHT, Subject, format_amount, parse_amount
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import Record, finish_list_parser, finish_parser, get_os_user, open_database
from skyrl_tx.store import audit, keys
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import OverQuota

_SUBJECT = (
    "an owner, key:NUMBER or project:NAME; use '*', 'key:*' or 'project:*' for all owners, keys or projects that have "
    "no quota themselves"
)
_WEIGHT = (
    f"{WEIGHT}, for an owner (1 to {quotas.MAX_WEIGHT}, default 1): while two owners have work, an owner with weight 2 "
    "gets twice the device time of an owner with weight 1; with weight 0, an owner runs only while no other has work"
)
_LIMIT = f"{', '.join(LIMITS)}; or {_WEIGHT}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show all quotas and how much of them is used")
    finish_list_parser(listing, _read_records, nothing="no quotas")

    setting = actions.add_parser(
        "set",
        help="set a quota, or an owner's weight",
        description="Set a quota, or an owner's weight. A running server applies it within about a second.",
    )

    setting.add_argument("subject", metavar="SUBJECT", help=_SUBJECT)
    setting.add_argument("limit", metavar="LIMIT", help=_LIMIT)
    setting.add_argument(
        "value", metavar="VALUE", help="a whole number, or a number with a decimal unit, for example 200M or 5G"
    )
    setting.add_argument(
        "--over",
        choices=get_args(OverQuota),
        default="wait",
        help="whether requests beyond a daily quota wait until 00:00 UTC (default) or fail",
    )
    finish_parser(setting, _set)

    removing = actions.add_parser("remove", help="remove a quota, or an owner's weight")
    removing.add_argument("subject", metavar="SUBJECT", help=_SUBJECT)
    removing.add_argument("limit", metavar="LIMIT", help="the name of a limit, or 'weight'")
    finish_parser(removing, _remove)


def _read_records(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    now = time.time()
    used = {
        (use.quota.subject, use.quota.limit): use.used for use in read_quota_uses(tx, quotas.read_rules(tx), None, now)
    }

    records: list[Record] = []
    for row in quotas.list_rows(tx):
        subject = Subject(row.subject_kind, row.subject)
        amount = used.get((subject, row.name))  # pyright: ignore[reportArgumentType]
        records.append(
            {
                "subject": str(subject),
                "limit": row.name,
                "value": row.value if arguments.json else format_amount(row.value),
                "over": row.over if row.name in DAY_LIMITS else None,
                "used": amount if arguments.json or amount is None else format_amount(amount),
            }
        )
    return records


def _set(arguments: argparse.Namespace) -> None:
    value = parse_amount(arguments.value)
    _change_quota(arguments, value)
    consequence = "" if arguments.over == "wait" else "; requests beyond it fail"
    print(f"{arguments.limit} of {arguments.subject} is {format_amount(value)}{consequence}")


def _remove(arguments: argparse.Namespace) -> None:
    if not _change_quota(arguments, None):
        raise CommandError(f"{arguments.subject} has no {arguments.limit}; `skyrl-tx quotas list` shows all")
    print(f"removed {arguments.limit} of {arguments.subject}")


def _change_quota(arguments: argparse.Namespace, value: int | None) -> bool:
    """Set a quota or a weight, or remove it if `value` is None. Returns False if there was nothing to remove."""
    subject, limit = Subject.parse(arguments.subject), arguments.limit
    over: OverQuota = "wait" if value is None else arguments.over
    quotas.check_quota(subject, limit, value, over)
    with open_database(arguments) as store:
        if value is not None:
            _check_subject(store, subject)
        return store.write(
            lambda tx: quotas.put(
                tx, subject, limit, value, audit.OPERATOR, time.time(), over=over, os_user=get_os_user()
            )
        )


def _check_subject(store: Store, subject: Subject) -> None:
    """Raise CommandError if a subject is a key that does not exist. Print a note about an owner without keys."""
    all_keys = store.read(keys.list_all)
    if subject.kind == "key" and subject.name not in (ANY, *(str(row.key_id) for row in all_keys)):
        raise CommandError(f"there is no key {subject.name}; `skyrl-tx keys list` shows all keys")
    if subject.kind == "owner" and subject.name not in (ANY, *(row.owner for row in all_keys)):
        print(f"note: {subject.name} has no API key; `skyrl-tx keys list` shows all owners", file=sys.stderr)
