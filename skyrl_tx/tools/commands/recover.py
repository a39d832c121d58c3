"""`skyrl-tx recover`: bring back checkpoints whose files still exist.

An artifact is *unclaimed* if the database has no row for it, for example because the database was lost or restored
from an old backup. The manifest of the artifact has what the missing rows contained. An artifact in the trash still
has its files; its rows are restored from the manifest too.
"""

import argparse
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from skyrl_tx.artifacts import Artifact, ArtifactCorrupt, ArtifactMissing, ArtifactStore, read_recorded_url
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import (
    Record,
    finish_parser,
    format_table,
    format_time,
    open_artifact_store,
    open_database,
)
from skyrl_tx.process.text import format_bytes
from skyrl_tx.store import identity, manifests, models
from skyrl_tx.store.database import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Re-register checkpoints that the database does not know, for example because it was lost or restored from an "
        "old backup. The files of each checkpoint contain what is needed. The newest snapshot of a run becomes its "
        "checkpoint `snapshot-N`. Checkpoints keep their owners, no checkpoint is public, and runs are not loaded. The "
        "server may keep running."
    )

    parser.add_argument(
        "artifact",
        nargs="*",
        metavar="ARTIFACT",
        help="ids of artifacts to restore, including artifacts in the trash (default: all checkpoints that the "
        "database does not know, and the newest snapshot of each run)",
    )
    parser.add_argument("--list", action="store_true", help="list what can be restored, without changing anything")
    parser.add_argument("--trash", action="store_true", help="also restore all checkpoints in the trash")
    finish_parser(parser, _run)


@dataclass(frozen=True, slots=True)
class _Restorable:
    """An artifact that can be restored, either unclaimed or in the trash."""

    artifact: Artifact
    is_trashed: bool


def _run(arguments: argparse.Namespace) -> int:
    url = arguments.artifacts or read_recorded_url(arguments.data_dir)
    if not url and not (arguments.data_dir / "artifacts").is_dir():
        raise CommandError(f"--data-dir {arguments.data_dir}: no server has stored weights there")

    with open_database(arguments, create=True) as store:  # the database may be lost
        artifacts = open_artifact_store(arguments)
        unclaimed, trashed = identity.find_unclaimed(store, artifacts), artifacts.list_ids(trashed=True)
        candidates = [*_describe(artifacts, unclaimed), *_describe(artifacts, trashed, is_trashed=True)]
        if arguments.list:
            table = format_table([_make_record(candidate) for candidate in candidates])
            print("\n".join(table) if candidates else "nothing to restore")
            return 0

        # Choose what to restore.
        if arguments.artifact:
            chosen = _choose_named(artifacts, candidates, arguments.artifact)
        else:
            chosen = _choose_default(candidates)
        if arguments.trash:
            chosen += [candidate for candidate in candidates if candidate.is_trashed and candidate not in chosen]
        if not chosen:
            print("nothing to restore")

        # The newest artifact comes first, because it gets the name if multiple artifacts had the same one. Snapshots
        # come last: snapshots of early releases do not name the base model, so a checkpoint must restore their run.
        chosen.sort(key=lambda candidate: manifests.get_save_time(candidate.artifact), reverse=True)
        chosen.sort(key=lambda candidate: "effect_order" in candidate.artifact.metadata)
        results = [_restore(store, artifacts, candidate) for candidate in chosen]
    return 0 if all(results) else 1


def _describe(
    artifacts: ArtifactStore, artifact_ids: Collection[ArtifactId], *, is_trashed: bool = False
) -> list[_Restorable]:
    """Read the manifests of artifacts. Prints the artifacts whose manifest is damaged, and leaves them out."""
    candidates: list[_Restorable] = []
    for artifact_id in sorted(artifact_ids):
        try:
            candidates.append(_Restorable(artifacts.describe(artifact_id, trashed=is_trashed), is_trashed))
        except ArtifactMissing:  # removed since it was listed
            continue
        except ArtifactCorrupt as error:
            print(f"cannot restore {artifact_id}: {error}", file=sys.stderr)
    return candidates


def _choose_default(candidates: Sequence[_Restorable]) -> list[_Restorable]:
    """Choose all unclaimed checkpoints, and the newest unclaimed snapshot of each run. Skips ephemeral samplers."""
    chosen: list[_Restorable] = []
    snapshots: dict[str, _Restorable] = {}
    for candidate in candidates:
        metadata = candidate.artifact.metadata
        if candidate.is_trashed or manifests.is_ephemeral(candidate.artifact):
            continue
        if (order := metadata.get("effect_order")) is None:
            chosen.append(candidate)
            continue
        newest = snapshots.get(metadata["model_id"])
        if newest is None or int(newest.artifact.metadata["effect_order"]) < int(order):
            snapshots[metadata["model_id"]] = candidate
    return chosen + list(snapshots.values())


def _choose_named(
    artifacts: ArtifactStore, candidates: Sequence[_Restorable], texts: Sequence[str]
) -> list[_Restorable]:
    """Return the artifacts with the given ids, without duplicates. Raises CommandError for other ids."""
    by_id = {candidate.artifact.artifact_id: candidate for candidate in candidates}
    for text in texts:
        if text not in by_id:
            if artifacts.has(ArtifactId(text)):
                raise CommandError(f"{text} is in use, so there is nothing to restore")
            raise CommandError(f"{text} is neither unclaimed nor in the trash; `skyrl-tx recover --list` shows all")
    return [by_id[ArtifactId(text)] for text in dict.fromkeys(texts)]


def _make_record(candidate: _Restorable) -> Record:
    metadata = candidate.artifact.metadata
    order = metadata.get("effect_order")
    return {
        "artifact": candidate.artifact.artifact_id,
        "place": "trash" if candidate.is_trashed else "unclaimed",
        "run": metadata.get("model_id"),
        "kind": metadata.get("kind") if order is None else "snapshot",
        "name": metadata.get("name") if order is None else order,
        "owner": metadata.get("owner"),
        "saved": format_time(manifests.get_save_time(candidate.artifact)),
        "size": format_bytes(candidate.artifact.size_bytes),
    }


def _restore(store: Store, artifacts: ArtifactStore, candidate: _Restorable) -> bool:
    """Restore one artifact and its rows. If that fails, print the reason and return False.

    An artifact from the trash goes back there if its rows cannot be restored.
    """
    artifact_id = candidate.artifact.artifact_id
    try:
        if candidate.is_trashed:
            artifacts.restore(artifact_id)
        artifact = artifacts.open(artifact_id)
        path = store.write(lambda tx: manifests.restore_rows(tx, artifact, time.time()))
    except (ArtifactMissing, ArtifactCorrupt, manifests.Unrecoverable) as error:
        if candidate.is_trashed:
            with suppress(ArtifactMissing):
                artifacts.discard(artifact_id)
        print(f"cannot restore {artifact_id}: {error}", file=sys.stderr)
        return False
    owner = store.read(lambda tx: models.get_owner(tx, path.model_id))
    print(f"restored {path} of {owner}, saved {format_time(manifests.get_save_time(artifact))}")
    return True
