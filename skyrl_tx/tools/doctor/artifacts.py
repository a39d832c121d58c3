"""Checks of the weight files: compares the rows of the database with them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sqlmodel import Session, col, select

from skyrl_tx.artifacts import ArtifactCorrupt, ArtifactMissing, ArtifactStore
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import Progress, Record, confirm, format_bytes
from skyrl_tx.store import checkpoints, identity
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, SamplingSessionRow, SnapshotRow
from skyrl_tx.tools.doctor.findings import Finding, error, ok, warning

_RESTORE = "restore a backup, or see `skyrl-tx recover --list`"
_EPHEMERAL = "ephemeral sampler of "


@dataclass(slots=True)
class ArtifactReport:
    """The findings about each artifact."""

    damage: str | None = None
    """The first damage of the database."""
    is_foreign: bool = False
    """Whether the database is not, or may not be, the one that the artifacts belong to."""
    records: list[Record] = field(default_factory=list[Record])
    num_trashed: int = 0

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


def check_artifacts(report: ArtifactReport) -> Iterator[Finding]:
    """Return what a report says as findings."""
    if report.damage is not None:
        yield error("database", f"it is damaged: {report.damage}", _RESTORE)
    if report.is_foreign:
        yield warning(
            "artifacts",
            "the database is new, another one, or older than the artifacts; none that it does not know are removed",
            "is this the right database? If it was lost, `skyrl-tx recover` restores checkpoints",
        )
    states = Counter(str(record["state"]) for record in report.records)
    size = format_bytes(sum(int(str(record["bytes"])) for record in report.records))
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none"
    yield ok("artifacts", f"{counts}; {size}; {report.num_trashed} more in the trash")
    if num_lost := states["missing"] + states["damaged"]:
        yield error("artifacts", f"{num_lost} are missing or damaged", _RESTORE)
    if states["unclaimed"]:
        advice = "`skyrl-tx recover` restores checkpoints, --remove-unclaimed moves them to the trash"
        yield warning("artifacts", f"{states['unclaimed']} are unclaimed: the database does not know them", advice)


def examine_artifacts(store: Store, artifacts: ArtifactStore, *, with_hashes: bool) -> ArtifactReport:
    """Check the database, then each artifact that a row refers to, then the others.

    Of those in an object store the sizes of all files are compared; hashes are checked whenever they are read.
    """
    is_known = not artifacts.list_ids() or identity.is_current(store.read(identity.get), artifacts.read_identity())
    report = ArtifactReport(
        damage=store.find_damage(), is_foreign=not is_known, num_trashed=len(artifacts.list_ids(trashed=True))
    )
    used, unclaimed = store.read(_find_references), identity.find_unclaimed(store, artifacts)
    present, trash = set(artifacts.list_ids()), set(artifacts.list_ids(trashed=True))
    sizes = {artifact_id: _measure_size(artifacts, artifact_id) for artifact_id in present}
    progress = Progress("checked", sum(sizes.values()))
    for artifact_id in sorted(used.keys() | present):
        used_by, size = used.get(artifact_id), sizes.get(artifact_id, 0)
        if used_by is None:
            state = "unclaimed" if artifact_id in unclaimed else "unused"
            report.add(artifact_id, state, size, None, _describe_artifact(artifacts, artifact_id))
            continue
        try:
            artifacts.open(artifact_id) if with_hashes and not artifacts.is_remote else artifacts.describe(artifact_id)
            report.add(artifact_id, "ok", size, used_by)
        except ArtifactCorrupt as error:
            report.add(artifact_id, "damaged", size, used_by, str(error))
        except (ArtifactMissing, OSError):
            if artifact_id not in store.read(_find_references):  # replaced meanwhile by a running server
                continue
            if used_by.startswith(_EPHEMERAL):
                report.add(artifact_id, "unwritten", 0, used_by, "the next start of the engine creates it again")
                continue
            detail = f"it is in the trash: skyrl-tx recover {artifact_id}" if artifact_id in trash else ""
            report.add(artifact_id, "missing", 0, used_by, detail)
        progress.add(size)
    progress.close()
    return report


def _find_references(tx: Session) -> Mapping[ArtifactId, str]:
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
    for artifact_id in checkpoints.find_referenced_artifacts(tx) or ():
        found.setdefault(artifact_id, ["a load_weights request"])
    return {artifact_id: ", ".join(uses) for artifact_id, uses in found.items()}


def _describe_artifact(artifacts: ArtifactStore, artifact_id: ArtifactId) -> str:
    try:
        return artifacts.describe(artifact_id).title
    except (ArtifactCorrupt, ArtifactMissing) as error:
        return str(error)


def _measure_size(artifacts: ArtifactStore, artifact_id: ArtifactId) -> int:
    try:
        return artifacts.describe(artifact_id).size_bytes
    except (ArtifactCorrupt, ArtifactMissing):
        return 0


def remove_unclaimed(store: Store, artifacts: ArtifactStore, *, is_confirmed: bool) -> int:
    """Move the unclaimed artifacts to the trash; return the exit status. Raises CommandError if that is refused."""
    unclaimed = sorted(identity.find_unclaimed(store, artifacts))
    if not unclaimed:
        print("no unclaimed artifacts")
        return 0
    size = format_bytes(sum(_measure_size(artifacts, artifact_id) for artifact_id in unclaimed))
    if not is_confirmed and not confirm(f"move {len(unclaimed)} artifacts ({size}) to the trash?"):
        raise CommandError("nothing was moved")
    for artifact_id in unclaimed:
        artifacts.discard(artifact_id)
    print(f"moved {len(unclaimed)} artifacts ({size}) to the trash; the server removes them after --trash-retention-s")
    return 0
