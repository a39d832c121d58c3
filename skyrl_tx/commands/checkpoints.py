"""`skyrl-tx checkpoints`: what was saved, for how long, and making room."""

import argparse
import time

from sqlmodel import Session, col, or_, select

from skyrl_tx.api.translate.checks import MAX_TTL_S
from skyrl_tx.commands.place import CommandError, add_data_dir, find_checkpoint, free_files, opened
from skyrl_tx.commands.table import Record, show, when
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath
from skyrl_tx.store import checkpoints
from skyrl_tx.store.tables import CheckpointRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show checkpoints, newest first", allow_abbrev=False)
    listing.add_argument("--run", dest="run_id", metavar="RUN", help="only checkpoints of this run")
    listing.add_argument("--kind", choices=[kind.value for kind in CheckpointKind], help="only those of this kind")
    listing.add_argument("--json", action="store_true", help="print JSON")
    add_data_dir(listing)
    listing.set_defaults(run=_list)
    removal = actions.add_parser("delete", help="delete checkpoints", allow_abbrev=False)
    removal.add_argument("path", nargs="+", metavar="PATH", help="tinker://<run>/<kind>/<name>")
    add_data_dir(removal)
    removal.set_defaults(run=_delete)
    keeping = actions.add_parser("keep", help="say how long checkpoints last", allow_abbrev=False)
    keeping.add_argument("path", nargs="+", metavar="PATH", help="tinker://<run>/<kind>/<name>")
    keeping.add_argument("--for", dest="seconds", type=int, metavar="SECONDS", help="from now on; default: for ever")
    add_data_dir(keeping)
    keeping.set_defaults(run=_keep)


def _list(arguments: argparse.Namespace) -> int:
    def work(tx: Session) -> list[Record]:
        now = time.time()
        lasts = or_(col(CheckpointRow.expires_at).is_(None), col(CheckpointRow.expires_at) > now)
        wanted = select(CheckpointRow).where(lasts).order_by(col(CheckpointRow.created_at).desc())
        if arguments.run_id is not None:
            wanted = wanted.where(CheckpointRow.model_id == arguments.run_id)
        if arguments.kind is not None:
            wanted = wanted.where(CheckpointRow.kind == arguments.kind)
        return [
            {
                "path": str(row.path),
                "made": when(row.created_at),
                "expires": when(row.expires_at),
                "public": row.public,
                "bytes": row.size_bytes,
            }
            for row in tx.exec(wanted)
        ]

    with opened(arguments) as store:
        show(store.read(work), as_json=arguments.json, nothing="no checkpoints")
    return 0


def _delete(arguments: argparse.Namespace) -> int:
    with opened(arguments) as store:
        paths = [find_checkpoint(store, text).path for text in arguments.path]

        def work(tx: Session) -> None:
            for path in paths:
                checkpoints.delete(tx, path)

        store.write(work)
        for path in paths:
            print(f"deleted {path}")
        print(free_files(store, arguments.data_dir))
    return 0


def _keep(arguments: argparse.Namespace) -> int:
    if arguments.seconds is not None and not 0 < arguments.seconds <= MAX_TTL_S:
        raise CommandError(f"--for {arguments.seconds}: must be above 0, and at most {MAX_TTL_S} (ten years)")
    expires_at = None if arguments.seconds is None else time.time() + arguments.seconds
    with opened(arguments) as store:
        paths = [CheckpointPath.parse(str(find_checkpoint(store, text).path)) for text in arguments.path]

        def work(tx: Session) -> None:
            for path in paths:
                checkpoints.set_ttl(tx, path, expires_at)

        store.write(work)
    for path in paths:
        print(f"{path} lasts {'for ever' if expires_at is None else f'until {when(expires_at)}'}")
    return 0
