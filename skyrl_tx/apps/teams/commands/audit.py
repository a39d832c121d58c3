"""`skyrl-tx audit`: show the audit log."""

import argparse
import time
from typing import get_args

from sqlmodel import Session

from skyrl_tx.launch.command_line import Record, add_since, finish_list_parser, format_time
from skyrl_tx.store import audit

_MAX_ENTRIES = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_since(parser, days=7)
    parser.add_argument(
        "--actor", help="show only actions of this owner, or of 'operator' (commands on the server's machine)"
    )
    events = get_args(audit.Event)
    parser.add_argument(
        "--event", choices=events, metavar="EVENT", help=f"show only one kind of event: {', '.join(events)}"
    )
    finish_list_parser(parser, _read_records, nothing="no entries")


def _read_records(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    newest = audit.list_entries(
        tx,
        since=time.time() - arguments.since,
        actor=arguments.actor,
        event=arguments.event,
        limit=_MAX_ENTRIES,
        newest_first=True,
    )

    return [
        {
            "at": format_time(row.at),
            "event": row.event,
            "actor": row.actor,
            "key": row.key_id,
            "path": row.path,
            "details": row.details if arguments.json else _format_details(row.details),
        }
        for row in reversed(newest)
    ]


def _format_details(details: object) -> str | None:
    assert isinstance(details, dict)
    return " ".join(f"{name}={value}" for name, value in details.items()) or None
