"""`skyrl-tx doctor`: compares the rows of the database with the weight files."""

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlmodel import Session, col, select

from skyrl_tx.artifacts import ArtifactCorrupt, ArtifactMissing, ArtifactStore
from skyrl_tx.commands.common import (
    CommandError,
    Progress,
    Record,
    confirmed,
    finish_parser,
    in_units,
    open_database,
    table,
)
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.store import checkpoints, identity
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, SamplingSessionRow, SnapshotRow

_PROBLEMS = ("missing", "damaged", "unclaimed")
_EPHEMERAL = "ephemeral sampler of "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = textwrap.fill(
        "Compare the rows of the database with the weight files: missing and damaged files, files without a row. Works "
        "while a server runs. Changes nothing, except with --remove-unclaimed. The exit status is 1 if there is a "
        "problem.",
        width=110,
    )
    parser.add_argument("--no-hashes", action="store_true", help="do not read the weight files to check their hashes")
    parser.add_argument("--json", action="store_true", help="print JSON, with all artifacts")
    parser.add_argument(
        "--remove-unclaimed",
        action="store_true",
        help="move artifacts to the trash whose rows the database does not have, because it was lost or is older",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    finish_parser(parser, _run)


@dataclass(slots=True)
class _Report:
    database: str = "ok"
    problems: list[str] = field(default_factory=list[str])
    records: list[Record] = field(default_factory=list[Record])

    def add(self, artifact_id: ArtifactId, state: str, num_bytes: int, used_by: str | None, detail: str = "") -> None:
        """Add the finding about one artifact."""
        self.records.append(
            {
                "state": state,
                "artifact": artifact_id,
                "bytes": num_bytes,
                "used_by": used_by,
                "detail": detail or None,
            }
        )


def _run(arguments: argparse.Namespace) -> int:
    with open_database(arguments) as store:
        artifacts = ArtifactStore(arguments.data_dir / "artifacts")
        if arguments.remove_unclaimed:
            return _remove_unclaimed(store, artifacts, is_confirmed=arguments.yes)
        report = _examine(store, artifacts, with_hashes=not arguments.no_hashes)
        num_trashed = len(artifacts.ids(trashed=True))
    num_problems = len(report.problems) + sum(record["state"] in _PROBLEMS for record in report.records)
    if arguments.json:
        summary = {"problems": num_problems, "database": report.problems or ["ok"], "trash": num_trashed}
        print(json.dumps({**summary, "artifacts": report.records}, indent=2))
    else:
        _print(report, num_trashed)
    return 1 if num_problems else 0


def _print(report: _Report, num_trashed: int) -> None:
    notable = [record for record in report.records if record["state"] != "ok"]
    if notable:
        print("\n".join(table(notable)))
    for problem in report.problems:
        print(problem)
    states = Counter(str(record["state"]) for record in report.records)
    num_bytes = sum(int(str(record["bytes"])) for record in report.records)
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none"
    print(f"artifacts: {counts}; {in_units(num_bytes)}; {num_trashed} more in the trash")
    if states["unclaimed"]:
        print("unclaimed: `skyrl-tx recover` restores checkpoints, --remove-unclaimed moves them to the trash")


def _examine(store: Store, artifacts: ArtifactStore, *, with_hashes: bool) -> _Report:
    """Check the database, then each artifact that a row refers to, then the others."""
    report = _Report()
    if (damage := store.find_damage()) is not None:
        report.problems.append(f"database: {damage}")
    if artifacts.ids() and not identity.is_current(store.read(identity.get), artifacts.identity()):
        report.problems.append(
            "database: it is new, another one, or older than the artifacts; none that it does not know are removed"
        )
    used, unclaimed = store.read(_references), identity.find_unclaimed(store, artifacts)
    present, trash = set(artifacts.ids()), set(artifacts.ids(trashed=True))
    sizes = {artifact_id: _size(artifacts, artifact_id) for artifact_id in present}
    progress = Progress("checked", sum(sizes.values()))
    for artifact_id in sorted(used.keys() | present):
        used_by, size = used.get(artifact_id), sizes.get(artifact_id, 0)
        if used_by is None:
            state = "unclaimed" if artifact_id in unclaimed else "unused"
            report.add(artifact_id, state, size, None, _title(artifacts, artifact_id))
            continue
        try:
            artifacts.open(artifact_id) if with_hashes else artifacts.describe(artifact_id)
            report.add(artifact_id, "ok", size, used_by)
        except ArtifactCorrupt as error:
            report.add(artifact_id, "damaged", size, used_by, str(error))
        except (ArtifactMissing, OSError):
            if artifact_id not in store.read(_references):  # replaced meanwhile by a running server
                continue
            if used_by.startswith(_EPHEMERAL):
                report.add(artifact_id, "unwritten", 0, used_by, "the next start of the engine creates it again")
                continue
            detail = f"it is in the trash: skyrl-tx recover {artifact_id}" if artifact_id in trash else ""
            report.add(artifact_id, "missing", 0, used_by, detail)
        progress.add(size)
    progress.close()
    return report


def _references(tx: Session) -> Mapping[ArtifactId, str]:
    """Return what refers to each referenced artifact."""
    found: dict[ArtifactId, list[str]] = {}
    for row in tx.exec(select(CheckpointRow)):
        found.setdefault(row.artifact_id, []).append(str(row.path))
    for row in tx.exec(select(SnapshotRow)):
        found.setdefault(row.artifact_id, []).append(f"snapshot of {row.model_id}")
    samplers = select(SamplingSessionRow.sampler_id, SamplingSessionRow.model_id).where(
        col(SamplingSessionRow.sampler_id).is_not(None)
    )
    for sampler_id, model_id in tx.exec(samplers):
        uses = found.setdefault(ArtifactId(str(sampler_id)), [])
        if not uses:
            uses.append(f"{_EPHEMERAL}{model_id}" if model_id else "a sampling session")
    for artifact_id in checkpoints.referenced_artifacts(tx) or ():
        found.setdefault(artifact_id, ["a load_weights request"])
    return {artifact_id: ", ".join(uses) for artifact_id, uses in found.items()}


def _title(artifacts: ArtifactStore, artifact_id: ArtifactId) -> str:
    try:
        return artifacts.describe(artifact_id).title
    except (ArtifactCorrupt, ArtifactMissing) as error:
        return str(error)


def _size(artifacts: ArtifactStore, artifact_id: ArtifactId) -> int:
    try:
        return artifacts.describe(artifact_id).size_bytes
    except (ArtifactCorrupt, ArtifactMissing):
        return 0


def _remove_unclaimed(store: Store, artifacts: ArtifactStore, *, is_confirmed: bool) -> int:
    unclaimed = sorted(identity.find_unclaimed(store, artifacts))
    if not unclaimed:
        print("no unclaimed artifacts")
        return 0
    size = in_units(sum(_size(artifacts, artifact_id) for artifact_id in unclaimed))
    if not is_confirmed and not confirmed(f"move {len(unclaimed)} artifacts ({size}) to the trash?"):
        raise CommandError("nothing was moved")
    for artifact_id in unclaimed:
        artifacts.discard(artifact_id)
    print(f"moved {len(unclaimed)} artifacts ({size}) to the trash; the server removes them after --trash-retention-s")
    return 0
