"""`skyrl-tx runs`: what was trained, and making room."""

import argparse
import time

from sqlmodel import Session, col, select

from skyrl_tx.commands.place import CommandError, add_data_dir, free_files, opened
from skyrl_tx.commands.table import Record, show, when
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import ModelSpec, UnloadModel
from skyrl_tx.store import checkpoints, futures, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.removal import remove_run
from skyrl_tx.store.tables import ModelRow, SessionRow

_UNLOADED_WITHIN_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show all runs, the last used first", allow_abbrev=False)
    listing.add_argument("--owner", help="only runs of this owner")
    listing.add_argument("--json", action="store_true", help="print JSON")
    add_data_dir(listing)
    listing.set_defaults(run=_list)
    removal = actions.add_parser(
        "delete",
        help="delete runs with all their checkpoints",
        description="Delete runs with all their checkpoints and results. A run that a server holds is unloaded first.",
        allow_abbrev=False,
    )
    removal.add_argument("run_id", nargs="+", metavar="RUN", help="id of a run, as `list` shows it")
    removal.add_argument("--yes", action="store_true", help="do not ask")
    add_data_dir(removal)
    removal.set_defaults(run=_delete)


def _list(arguments: argparse.Namespace) -> int:
    with opened(arguments) as store:
        records = store.read(lambda tx: _records(tx, arguments.owner))
    show(records, as_json=arguments.json, nothing="no runs")
    return 0


def _records(tx: Session, owner: str | None) -> list[Record]:
    wanted = select(ModelRow, SessionRow.owner).join(SessionRow).order_by(col(ModelRow.last_request_at).desc())
    if owner is not None:
        wanted = wanted.where(SessionRow.owner == owner)
    records: list[Record] = []
    for row, whose in tx.exec(wanted):
        saved = checkpoints.list_of_run(tx, row.model_id, time.time())
        spec = codec.decode(row.spec)
        assert isinstance(spec, ModelSpec)
        records.append(
            {
                "run": row.model_id,
                "base_model": row.base_model,
                "rank": spec.lora.rank,
                "owner": whose,
                "status": row.status,
                "last_used": when(row.last_request_at),
                "checkpoints": len(saved),
                "bytes": sum(checkpoint.size_bytes for checkpoint in saved),
            }
        )
    return records


def _delete(arguments: argparse.Namespace) -> int:
    with opened(arguments) as store:
        for run_id in arguments.run_id:
            if store.read(lambda tx, run_id=run_id: models.get(tx, ModelId(run_id))) is None:
                raise CommandError(f"{run_id!r}: there is no such run; `skyrl-tx runs list` shows those there are")
        if not arguments.yes and not _confirmed(f"delete {', '.join(arguments.run_id)} with all checkpoints?"):
            return 1
        for run_id in arguments.run_id:
            _remove(store, ModelId(run_id))
            print(f"deleted {run_id}")
        print(free_files(store, arguments.data_dir))
    return 0


def _confirmed(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise CommandError("nobody is there to answer; say --yes") from None


def _remove(store: Store, model_id: ModelId) -> None:
    """Have a run out of every engine's memory, then remove its rows."""
    if store.peer_lives():
        _unload(store, model_id)
        store.write(lambda tx: remove_run(tx, model_id))
        return

    def work(tx: Session) -> None:
        row = models.get(tx, model_id)
        if row is not None and row.status in ("creating", "ready"):
            models.set_status(tx, model_id, "unloaded")
        remove_run(tx, model_id)

    store.write(work)


def _unload(store: Store, model_id: ModelId) -> None:
    """Ask the running engine to let a run go, in its turn, and wait until it has."""

    def ask(tx: Session) -> None:
        row = models.get(tx, model_id)
        if row is None or row.status not in ("creating", "ready"):
            return
        request = UnloadModel()
        new = NewRequest(
            key="",
            kind=codec.kind_of(request),
            owner=models.owner(tx, model_id) or "",
            session_id=row.session_id,
            body=codec.encode(request),
            model_id=model_id,
            seq_id=None,
        )
        futures.submit(tx, new, time.time())

    store.write(ask)
    end = time.monotonic() + _UNLOADED_WITHIN_S
    while (row := store.read(lambda tx: models.get(tx, model_id))) and row.status in ("creating", "ready"):
        if time.monotonic() > end:
            raise CommandError(f"{model_id}: the running server is still at work on it; try again later")
        store.wait(0.2)
