"""`skyrl-tx runs` and `skyrl-tx checkpoints`: list, show, delete and restore training runs and their checkpoints.

`delete` only marks a run or checkpoint as deleted, so that `undelete` can restore it for a day. With `--now` its rows
are removed from the database at once, and weight files that no other row refers to are collected: checkpoints are
moved to the trash, and other files are removed.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from sqlmodel import Session, col, select

from skyrl_tx.apps.history import points, run_report
from skyrl_tx.apps.history.curves import fold_points
from skyrl_tx.compose import APPS
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, ModelId
from skyrl_tx.contract.numbers import MAX_TTL_S
from skyrl_tx.contract.requests import ModelSpec, UnloadModel
from skyrl_tx.engine.extension import Retention
from skyrl_tx.launch.command import CommandError, load_engine_extensions
from skyrl_tx.launch.command_line import (
    Record,
    confirm,
    find_checkpoint,
    finish_list_parser,
    finish_parser,
    format_time,
    open_artifact_store,
    open_database,
    parse_count,
    parse_duration_s,
    record_audit,
)
from skyrl_tx.store import StoreInUse, audit, checkpoints, futures, identity, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.dialect import lock_role
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import CheckpointRow, ModelRow, SessionRow

_LAST_PASSES = 64
"""How many of a run's newest passes are read to compute its last loss."""
_LOADED_STATUSES = ("creating", "ready")
"""The status of a run that an engine may have in memory."""
_UNLOAD_TIMEOUT_S = 60.0
_RESTORE_HINT = "the files are kept for a day; until then, restore with `skyrl-tx "


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `runs`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list all runs, most recently used first")
    listing.add_argument("--owner", help="list only the runs of this owner")
    listing.add_argument(
        "--deleted", action="store_true", help="list only deleted runs, which `undelete` can still restore"
    )
    finish_list_parser(listing, _read_runs, nothing="no runs")

    showing = actions.add_parser("show", help="show one run: metrics, curves and checkpoints")
    showing.add_argument("run_id", metavar="RUN", help="the id of a run, as `list` shows it")
    showing.add_argument("--json", action="store_true", help="print JSON, with all data points of the curves")
    finish_parser(showing, run_report.show)

    deleting = actions.add_parser(
        "delete",
        help="delete runs with all their checkpoints",
        description="Delete runs with all their checkpoints and results. `skyrl-tx runs undelete` can restore them for "
        "a day. With --now they are removed from the database at once; a running server unloads the runs first.",
    )
    deleting.add_argument("run_id", nargs="+", metavar="RUN", help="the id of a run, as `list` shows it")
    deleting.add_argument("--now", action="store_true", help="delete at once; `undelete` cannot restore the runs")
    deleting.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    finish_parser(deleting, _delete_runs)

    setting = actions.add_parser("set", help="set how many checkpoints runs keep")
    setting.add_argument("run_id", nargs="+", metavar="RUN", help="the id of a run, as `list` shows it")
    setting.add_argument(
        "--keep-last",
        type=_parse_keep_last,
        required=True,
        metavar="N",
        help="keep the newest N training checkpoints and the newest N sampler checkpoints of each run, or `all`. At "
        "each save, older checkpoints are moved to the trash, except published checkpoints and those with a TTL",
    )
    finish_parser(setting, _set_runs)

    restoring = actions.add_parser("undelete", help="restore deleted runs with their checkpoints")
    restoring.add_argument("run_id", nargs="+", metavar="RUN", help="the id of a run, as `list --deleted` shows it")
    finish_parser(restoring, _undelete_runs)


def _set_runs(arguments: argparse.Namespace) -> None:
    """Store how many checkpoints runs keep, and move the older ones to the trash."""
    keep: int = arguments.keep_last

    def work(tx: Session, run_id: ModelId) -> list[CheckpointPath]:
        row, now = models.get(tx, run_id), time.time()
        if row is None or row.deleted_at is not None:
            raise CommandError(f"{run_id!r}: there is no such run; `skyrl-tx runs list` shows all runs")
        row.user_metadata = {**(row.user_metadata or {}), checkpoints.KEEP_LAST: str(keep or "all")}
        trimmed = [path for kind in CheckpointKind for path in checkpoints.trim(tx, run_id, kind, keep, now)]
        for path in trimmed:
            record_audit(tx, "checkpoint_delete", path=path, purpose="keep_last")
        return trimmed

    with open_database(arguments) as store:
        for run_id in map(ModelId, arguments.run_id):
            trimmed = store.write(partial(work, run_id=run_id))
            kept = f"the newest {keep} checkpoints of each kind" if keep else "all checkpoints"
            print(f"{run_id} keeps {kept}; moved {len(trimmed)} to the trash")


def _parse_keep_last(text: str) -> int:
    """Convert the value of --keep-last. Returns 0 for `all`. Raises ArgumentTypeError."""
    try:
        return 0 if text == "all" else parse_count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or all") from None


def _read_runs(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    query = select(ModelRow, SessionRow).join(SessionRow).order_by(col(ModelRow.last_request_at).desc())
    deleted_at = col(ModelRow.deleted_at)
    query = query.where(deleted_at.is_not(None) if arguments.deleted else deleted_at.is_(None))
    if arguments.owner is not None:
        query = query.where(SessionRow.owner == arguments.owner)

    records: list[Record] = []
    for row, session in tx.exec(query):
        saved = [] if arguments.deleted else checkpoints.list_by_run(tx, row.model_id, time.time())
        spec = codec.decode(row.spec)
        assert isinstance(spec, ModelSpec)
        newest = points.read_newest(tx, row.model_id, _LAST_PASSES, "train")

        records.append(
            {
                "run": row.model_id,
                "name": run_report.find_name(tx, row.model_id, session.display_name),
                "base_model": row.base_model,
                "rank": spec.lora.rank,
                "owner": session.owner,
                "status": row.status,
                "step": row.num_steps,
                "loss": run_report.get_last_loss(fold_points(newest)),
                "last_used": format_time(row.last_request_at),
                "checkpoints": len(saved),
                "bytes": sum(checkpoint.size_bytes for checkpoint in saved),
                **_describe_deletion(row, arguments),
            }
        )
    return records


def _describe_deletion(row: ModelRow | CheckpointRow, arguments: argparse.Namespace) -> Record:
    return {"deleted": format_time(row.deleted_at)} if arguments.deleted else {}


def _delete_runs(arguments: argparse.Namespace) -> None:
    with open_database(arguments) as store:
        for run_id in arguments.run_id:
            row = store.read(lambda tx, run_id=run_id: models.get(tx, ModelId(run_id)))
            if row is None or (row.deleted_at is not None and not arguments.now):
                raise CommandError(f"{run_id!r}: there is no such run; `skyrl-tx runs list` shows all runs")
        if not arguments.yes and not confirm(f"delete {', '.join(arguments.run_id)} with all checkpoints?"):
            raise CommandError("nothing was deleted")

        if arguments.now:
            _claim_artifacts(store, arguments)
        for run_id in map(ModelId, arguments.run_id):
            if arguments.now:
                _delete_run(store, run_id)
            else:
                store.write(partial(_change_run, run_id=run_id, event="run_delete"))
            print(f"deleted {run_id}")
        print(_collect_artifacts(store, arguments) if arguments.now else f"{_RESTORE_HINT}runs undelete`")


def _change_run(tx: Session, run_id: ModelId, event: Literal["run_delete", "run_restore"]) -> bool:
    """Mark a run as deleted, or restore it. Returns False if there is no such run, or if there is nothing to change."""
    is_changed = models.mark_deleted(tx, run_id, time.time()) if event == "run_delete" else models.undelete(tx, run_id)
    if is_changed:
        record_audit(tx, event, run_id=run_id)
    return is_changed


def _undelete_runs(arguments: argparse.Namespace) -> None:
    with open_database(arguments) as store:
        for run_id in map(ModelId, arguments.run_id):
            if not store.write(partial(_change_run, run_id=run_id, event="run_restore")):
                raise CommandError(
                    f"{run_id!r}: there is no such deleted run; `skyrl-tx runs list --deleted` shows all of them"
                )
            print(f"restored {run_id}")


def _delete_run(store: Store, model_id: ModelId) -> None:
    """Remove a run from the database. If an engine is running, wait until it has unloaded the run."""
    if store.is_peer_running():
        _unload(store, model_id)

    retention = Retention.collect(load_engine_extensions(APPS))

    def work(tx: Session) -> None:
        models.set_status(tx, model_id, "unloaded")
        models.delete(tx, model_id, retention.delete_runs)

    store.write(work)


def _unload(store: Store, model_id: ModelId) -> None:
    """Ask the running engine to unload a run, and wait until it has. Raises CommandError after 60 seconds."""

    def submit(tx: Session) -> None:
        row = models.get(tx, model_id)
        if row is not None and row.status in _LOADED_STATUSES:
            new = NewRequest(
                key="",
                kind=codec.get_kind(UnloadModel()),
                owner=models.get_owner(tx, model_id) or "",
                session_id=row.session_id,
                body=codec.encode(UnloadModel()),
                model_id=model_id,
                engine=row.engine,
            )
            futures.submit(tx, new, time.time())

    store.write(submit)
    end = time.monotonic() + _UNLOAD_TIMEOUT_S
    while (row := store.read(lambda tx: models.get(tx, model_id))) and row.status in _LOADED_STATUSES:
        if time.monotonic() > end:
            raise CommandError(
                f"{model_id}: the running server did not unload the run within {_UNLOAD_TIMEOUT_S:.0f} s; "
                "it was not deleted, try again later"
            )
        store.wait(0.2)


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `checkpoints`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list checkpoints, newest first")
    listing.add_argument("--run", dest="run_id", metavar="RUN", help="list only the checkpoints of this run")
    listing.add_argument(
        "--kind", choices=[kind.value for kind in CheckpointKind], help="list only checkpoints of this kind"
    )
    listing.add_argument(
        "--deleted", action="store_true", help="list only deleted checkpoints, which `undelete` can still restore"
    )
    finish_list_parser(listing, _read_checkpoints, nothing="no checkpoints")

    deleting = actions.add_parser("delete", help="delete checkpoints; `undelete` can restore them for a day")
    _add_paths(deleting)
    deleting.add_argument(
        "--now", action="store_true", help="delete at once; `undelete` cannot restore the checkpoints"
    )
    finish_parser(deleting, _delete_checkpoints)

    restoring = actions.add_parser("undelete", help="restore deleted checkpoints")
    _add_paths(restoring)
    finish_parser(restoring, _undelete_checkpoints)

    keeping = actions.add_parser("keep", help="set when checkpoints expire")
    _add_paths(keeping)
    keeping.add_argument(
        "--for",
        dest="seconds",
        type=parse_duration_s,
        metavar="TIME",
        help="keep the checkpoints for this long from now, for example 12h or 30d (default: forever)",
    )
    finish_parser(keeping, _set_expiry)


def _add_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="+", metavar="PATH", help="a checkpoint: tinker://<run>/<kind>/<name>")


def _read_checkpoints(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    is_listed = col(CheckpointRow.deleted_at).is_not(None) if arguments.deleted else checkpoints.is_visible(time.time())
    query = select(CheckpointRow).where(is_listed).order_by(col(CheckpointRow.created_at).desc())
    if arguments.run_id is not None:
        query = query.where(CheckpointRow.model_id == arguments.run_id)
    if arguments.kind is not None:
        query = query.where(CheckpointRow.kind == arguments.kind)

    return [
        {
            "path": str(row.path),
            "made": format_time(row.created_at),
            "expires": format_time(row.expires_at),
            "public": row.public,
            "bytes": row.size_bytes,
            **_describe_deletion(row, arguments),
        }
        for row in tx.exec(query)
    ]


def _delete_checkpoints(arguments: argparse.Namespace) -> None:
    with open_database(arguments) as store:
        if arguments.now:
            _claim_artifacts(store, arguments)
            paths = list(map(CheckpointPath.parse, arguments.path))
            store.write(partial(_remove_checkpoints, paths=paths))
        else:
            change = partial(checkpoints.mark_deleted, now=time.time())
            paths = _change_all(store, arguments.path, change, "checkpoint_delete")
        for path in paths:
            print(f"deleted {path}")
        print(_collect_artifacts(store, arguments) if arguments.now else f"{_RESTORE_HINT}checkpoints undelete`")


def _remove_checkpoints(tx: Session, paths: Sequence[CheckpointPath]) -> None:
    """Remove checkpoints from the database. Raises CommandError if one of them does not exist."""
    for path in paths:
        if not checkpoints.delete(tx, path):
            raise CommandError(
                f"{path}: there is no such checkpoint; `skyrl-tx checkpoints list` shows all checkpoints"
            )
        record_audit(tx, "checkpoint_delete", path=path, for_good=True)


def _undelete_checkpoints(arguments: argparse.Namespace) -> None:
    paths = list(map(CheckpointPath.parse, arguments.path))

    def work(tx: Session) -> None:
        for path in paths:
            if models.is_deleted(tx, path.model_id):
                raise CommandError(
                    f"{path}: its run is deleted; `skyrl-tx runs undelete {path.model_id}` restores both"
                )
            if not checkpoints.undelete(tx, path):
                raise CommandError(
                    f"{path}: there is no such deleted checkpoint, or a new checkpoint has its name; "
                    "`skyrl-tx checkpoints list --deleted` shows all of them"
                )
            record_audit(tx, "checkpoint_restore", path=path)

    with open_database(arguments) as store:
        store.write(work)
        for path in paths:
            print(f"restored {path}")


def _set_expiry(arguments: argparse.Namespace) -> None:
    if arguments.seconds is not None and not 0 < arguments.seconds <= MAX_TTL_S:
        raise CommandError(f"--for {arguments.seconds:g}s must be from 1 to {MAX_TTL_S} seconds (ten years)")
    ttl_s = None if arguments.seconds is None else int(arguments.seconds)
    expires_at = None if ttl_s is None else time.time() + ttl_s
    with open_database(arguments) as store:
        change = partial(checkpoints.set_ttl, expires_at=expires_at)
        for path in _change_all(store, arguments.path, change, "checkpoint_ttl_set", ttl_seconds=ttl_s):
            print(f"{path} {'never expires' if expires_at is None else f'expires at {format_time(expires_at)}'}")


def _change_all(
    store: Store,
    texts: Sequence[str],
    change: Callable[[Session, CheckpointPath], object],
    event: audit.Event,
    **details: audit.Detail,
) -> list[CheckpointPath]:
    """Change all checkpoints in one transaction, and add one entry per checkpoint to the audit log.

    Returns the paths of the checkpoints.
    """
    paths = [find_checkpoint(store, text).path for text in texts]

    def work(tx: Session) -> None:
        for path in paths:
            change(tx, path)
            record_audit(tx, event, path=path, **details)

    store.write(work)
    return paths


def _claim_artifacts(store: Store, arguments: argparse.Namespace) -> None:
    """Record that the weight files in the data directory belong to this database, unless there is a record already.

    This must happen before rows are removed. Without the record, a later command could not distinguish files that
    this database no longer uses from files of another database.
    """
    artifacts = open_artifact_store(arguments)
    if not artifacts.is_remote and artifacts.read_identity() is None:
        with suppress(StoreInUse), lock_role(arguments.data_dir, "engine"):
            identity.claim(store, artifacts)


def _collect_artifacts(store: Store, arguments: argparse.Namespace) -> str:
    """Collect the weight files that no row refers to, unless an engine will do so. Returns a message for the user."""
    artifacts = open_artifact_store(arguments)
    if artifacts.is_remote:  # an engine on another machine may be collecting them
        return "the server removes the unused files"

    try:
        with lock_role(arguments.data_dir, "engine"):
            claim = identity.claim(store, artifacts)
            keep = store.read(checkpoints.find_referenced_artifacts)
            if keep is None:
                return (
                    "no files were removed, because a pending load_weights request is damaged; the request will fail "
                    "at the next start of the server, which then removes the files"
                )
            collected = artifacts.collect(keep | claim.unclaimed, claim.claimed_at)
    except StoreInUse:
        return "the running server removes the unused files"
    return (
        f"removed {len(collected)} unused artifacts (checkpoints were moved to the trash); artifacts of the last ten "
        "minutes are removed after the next start of the server"
    )
