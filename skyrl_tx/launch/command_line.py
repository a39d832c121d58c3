"""Helpers for commands: common flags, access to a data directory, and output."""

import argparse
import getpass
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from sqlmodel import Session

from skyrl_tx.artifacts import (
    ArtifactCorrupt,
    ArtifactMissing,
    ArtifactStore,
    ArtifactsUnreachable,
    InvalidLocation,
    open_artifacts,
)
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.settings import ENVIRONMENT_PREFIX, get_default_data_dir
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.text import format_bytes, make_line, parse_seconds
from skyrl_tx.store import StoreError, audit, checkpoints
from skyrl_tx.store.database import Store
from skyrl_tx.store.dialect import DATABASE_NAME
from skyrl_tx.store.tables import CheckpointRow

Record = dict[str, object]


def parse_path(text: str) -> Path:
    """Convert the value of a flag or an argument to an absolute path.

    Raises ArgumentTypeError if it begins with the name of an unknown user, for example ~unknown/data.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r}: {Path(text).parts[0]} has no home directory") from None


def parse_count(text: str) -> int:
    """Convert a whole number from 1. Raises ArgumentTypeError for other text."""
    if re.fullmatch(r"[1-9]\d{0,8}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 999999999")
    return int(text)


def parse_duration_s(text: str) -> float:
    """Convert a duration to seconds, for example 45s, 90m, 12h, 30d or 3600.

    Raises ArgumentTypeError if the text is no duration.
    """
    seconds = parse_seconds(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, or have a unit: 45s, 90m, 12h, 30d")
    return seconds


def add_since(parser: argparse.ArgumentParser, days: int) -> None:
    """Add the flag --since, a duration in seconds. The default is a number of days."""
    parser.add_argument(
        "--since",
        type=parse_duration_s,
        default=days * 86_400.0,
        metavar="TIME",
        help=f"how far back, for example 12h or 30d (default: {days}d)",
    )


def finish_parser(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int | None]) -> None:
    """Add the flags of a data directory, and set the function that runs the command.

    `run` may return an exit status; None means 0. Its errors about bad input and unusable data
    become `CommandError`.
    """

    def run_with_errors(arguments: argparse.Namespace) -> int | None:
        try:
            return run(arguments)
        except (UserError, StoreError, ArtifactMissing, ArtifactCorrupt, ArtifactsUnreachable) as error:
            raise CommandError(str(error)) from error
        except PermissionError as error:
            if not Path(error.filename or "").is_relative_to(arguments.data_dir):
                raise
            raise CommandError(f"--data-dir {explain_os_error(error, arguments.data_dir)}") from error

    # The flags have environment variables, like the settings of the server.
    parser.add_argument(
        "--data-dir",
        type=parse_path,
        default=os.environ.get(f"{ENVIRONMENT_PREFIX}DATA_DIR") or str(get_default_data_dir()),
        help="the server's data directory (default: $SKYRL_TX_DATA_DIR, or the default of `serve`)",
    )
    parser.add_argument(
        "--database-url",
        default=os.environ.get(f"{ENVIRONMENT_PREFIX}DATABASE_URL"),
        help="the server's database if it is not a file in --data-dir (default: $SKYRL_TX_DATABASE_URL)",
    )

    # The location of the weights is stored in the data directory, unless the flag is given.
    parser.add_argument(
        "--artifacts",
        default=os.environ.get(f"{ENVIRONMENT_PREFIX}ARTIFACTS"),
        help="the server's object store, if its weights are not in --data-dir (default: $SKYRL_TX_ARTIFACTS, or the "
        "location that --data-dir names)",
    )

    parser.set_defaults(run=run_with_errors)


def finish_list_parser(
    parser: argparse.ArgumentParser, read: Callable[[Session, argparse.Namespace], Sequence[Record]], nothing: str
) -> None:
    """Add the common flags and --json to a command that prints the records that `read` returns.

    Without records it prints the text `nothing`.
    """

    def run(arguments: argparse.Namespace) -> None:
        with open_database(arguments) as store:
            records = store.read(lambda tx: read(tx, arguments))
        if arguments.json:
            print(json.dumps(records, indent=2))
        else:
            print("\n".join(format_table(records)) if records else nothing)

    parser.add_argument("--json", action="store_true", help="print JSON")
    finish_parser(parser, run)


def open_database(
    arguments: argparse.Namespace, *, create: bool = False, accepts_older: bool = False
) -> closing[Store]:
    """Open the database. A server may be using it.

    Raises CommandError if it does not exist, unless `create`, and StoreError if an older release
    wrote it, unless `accepts_older`.
    """
    data_dir: Path = arguments.data_dir
    url: str | None = arguments.database_url or None
    if not create and url is None and not (data_dir / DATABASE_NAME).is_file():
        raise CommandError(f"--data-dir {data_dir}: no server has stored anything there")
    return closing(Store.open(data_dir, role="tool", url=url, creates=create, accepts_older=accepts_older))


def find_checkpoint(store: Store, text: str) -> CheckpointRow:
    """Return a checkpoint by its path.

    Raises UserError for an invalid path, CommandError for an unknown checkpoint.
    """
    path = CheckpointPath.parse(text)
    row = store.read(lambda tx: checkpoints.get(tx, path, time.time()))
    if row is None:
        raise CommandError(f"{path}: there is no such checkpoint; run `skyrl-tx checkpoints list` to see all")
    return row


def open_artifact_store(arguments: argparse.Namespace) -> ArtifactStore:
    """Open the artifacts of a data directory. Raises CommandError if they cannot be opened."""
    try:
        return open_artifacts(arguments.data_dir, arguments.artifacts or None)
    except InvalidLocation as error:
        raise CommandError(str(error)) from error


def confirm(question: str) -> bool:
    """Ask for confirmation on the terminal. Raises CommandError if there is no terminal."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise CommandError("no terminal to ask for confirmation; add --yes") from None


def record_audit(
    tx: Session, event: audit.Event, *, path: CheckpointPath | None = None, **details: audit.Detail
) -> None:
    """Add an entry about a command to the audit log, with the account that runs the command."""
    audit.record(tx, event, audit.OPERATOR, time.time(), path=path, os_user=get_os_user(), **details)


def get_os_user() -> str:
    """Return the account that runs the command, or its number if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class Progress:
    """Prints the progress of long work to standard error.

    It prints continuously on a terminal, and every ten seconds elsewhere.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total = what, total_bytes
        self._done = 0
        self._is_terminal = sys.stderr.isatty()
        self._period_s = 0.2 if self._is_terminal else 10.0
        self._next = time.monotonic() + self._period_s
        self._has_printed = False

    def add(self, num_bytes: int) -> None:
        """Add finished work."""
        self._done += num_bytes
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._period_s
            self._has_printed = True
            line = f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)}"
            print(line, end="\r" if self._is_terminal else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line on a terminal."""
        if self._has_printed and self._is_terminal:
            print(file=sys.stderr)


def format_time(seconds: float | None) -> str | None:
    """Format a time in UTC, for example `2026-01-31 12:00:00Z`."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def format_table(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of a table of records. All records must have the same keys.

    Control characters in text from clients are replaced.
    """
    rows = [[_format_cell(value) for value in record.values()] for record in records]
    rows.insert(0, [name.upper().replace("_", " ") for name in records[0]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _format_cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return make_line(", ".join(map(str, value))) or "-"
        case _:
            return make_line(str(value))
