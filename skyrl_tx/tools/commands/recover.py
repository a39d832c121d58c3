"""`skyrl-tx recover`: restores rows of checkpoints from the manifests of artifacts, and artifacts from the trash."""

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
    format_bytes,
    format_table,
    format_time,
    open_artifact_store,
    open_database,
)
from skyrl_tx.store import identity, manifests, models
from skyrl_tx.store.database import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Restore checkpoints whose rows the database does not have, because it was lost or is older, from the "
        "manifests of their files. The newest snapshot of a run becomes its checkpoint `snapshot-N`. Owners stay, "
        "nothing is public, and runs are restored unloaded. Works while a server runs."
    )
    parser.add_argument(
        "artifact",
        nargs="*",
        metavar="ARTIFACT",
        help="ids of artifacts, also of those in the trash (default: all unclaimed checkpoints and snapshots)",
    )
    parser.add_argument("--list", action="store_true", help="show what can be restored, and change nothing")
    parser.add_argument("--trash", action="store_true", help="restore all checkpoints in the trash, too")
    finish_parser(parser, _run)


@dataclass(frozen=True, slots=True)
class _Restorable:
    """An artifact that can be restored."""

    artifact: Artifact
    is_trashed: bool


def _run(arguments: argparse.Namespace) -> int:
    place = arguments.artifacts or read_recorded_url(arguments.data_dir)
    if not place and not (arguments.data_dir / "artifacts").is_dir():
        raise CommandError(f"--data-dir {arguments.data_dir}: no server has stored artifacts there")
    with open_database(arguments, create=True) as store:  # the old one may be lost
        artifacts = open_artifact_store(arguments)
        unclaimed, trashed = identity.find_unclaimed(store, artifacts), artifacts.list_ids(trashed=True)
        found = [*_describe(artifacts, unclaimed), *_describe(artifacts, trashed, is_trashed=True)]
        if arguments.list:
            print("\n".join(format_table([_make_record(each) for each in found])) if found else "nothing to restore")
            return 0
        chosen = _choose_named(artifacts, found, arguments.artifact) if arguments.artifact else _choose_default(found)
        if arguments.trash:
            chosen += [each for each in found if each.is_trashed and each not in chosen]
        if not chosen:
            print("nothing to restore")
        # The newest first, because it gets the name if several artifacts had it. Snapshots last, because those of early
        # releases do not name the base model: a checkpoint restores their run.
        chosen.sort(key=lambda each: manifests.get_save_time(each.artifact), reverse=True)
        chosen.sort(key=lambda each: "effect_order" in each.artifact.metadata)
        results = [_restore(store, artifacts, each) for each in chosen]
    return 0 if all(results) else 1


def _describe(
    artifacts: ArtifactStore, artifact_ids: Collection[ArtifactId], *, is_trashed: bool = False
) -> list[_Restorable]:
    found: list[_Restorable] = []
    for artifact_id in sorted(artifact_ids):
        try:
            found.append(_Restorable(artifacts.describe(artifact_id, trashed=is_trashed), is_trashed))
        except ArtifactMissing:  # removed since it was listed
            continue
        except ArtifactCorrupt as error:
            print(f"cannot restore {artifact_id}: {error}", file=sys.stderr)
    return found


def _choose_default(found: Sequence[_Restorable]) -> list[_Restorable]:
    """Choose the unclaimed checkpoints, and the newest unclaimed snapshot of each run; no ephemeral samplers."""
    chosen: list[_Restorable] = []
    snapshots: dict[str, _Restorable] = {}
    for each in found:
        metadata = each.artifact.metadata
        if each.is_trashed or manifests.is_ephemeral(each.artifact):
            continue
        if (order := metadata.get("effect_order")) is None:
            chosen.append(each)
            continue
        before = snapshots.get(metadata["model_id"])
        if before is None or int(before.artifact.metadata["effect_order"]) < int(order):
            snapshots[metadata["model_id"]] = each
    return chosen + list(snapshots.values())


def _choose_named(artifacts: ArtifactStore, found: Sequence[_Restorable], texts: Sequence[str]) -> list[_Restorable]:
    by_id = {each.artifact.artifact_id: each for each in found}
    for text in texts:
        if text not in by_id:
            why = "it is in use" if artifacts.has(ArtifactId(text)) else "`skyrl-tx recover --list` shows all"
            raise CommandError(f"{text}: it is neither unclaimed nor in the trash; {why}")
    return [by_id[ArtifactId(text)] for text in dict.fromkeys(texts)]


def _make_record(each: _Restorable) -> Record:
    metadata = each.artifact.metadata
    order = metadata.get("effect_order")
    return {
        "artifact": each.artifact.artifact_id,
        "place": "trash" if each.is_trashed else "unclaimed",
        "run": metadata.get("model_id"),
        "kind": metadata.get("kind") if order is None else "snapshot",
        "name": metadata.get("name") if order is None else order,
        "owner": metadata.get("owner"),
        "saved": format_time(manifests.get_save_time(each.artifact)),
        "size": format_bytes(each.artifact.size_bytes),
    }


def _restore(store: Store, artifacts: ArtifactStore, each: _Restorable) -> bool:
    """Restore one artifact and its rows; return whether that was possible."""
    artifact_id = each.artifact.artifact_id
    try:
        if each.is_trashed:
            artifacts.restore(artifact_id)
        artifact = artifacts.open(artifact_id)
        path = store.write(lambda tx: manifests.restore_rows(tx, artifact, time.time()))
    except (ArtifactMissing, ArtifactCorrupt, manifests.Unrecoverable) as error:
        if each.is_trashed:
            with suppress(ArtifactMissing):
                artifacts.discard(artifact_id)
        print(f"cannot restore {artifact_id}: {error}", file=sys.stderr)
        return False
    owner = store.read(lambda tx: models.get_owner(tx, path.model_id))
    print(f"restored {path} of {owner}, saved {format_time(manifests.get_save_time(artifact))}")
    return True
