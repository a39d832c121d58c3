"""Checks of the places of data: the data directory and its disk, compiled programs, the object store."""

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqlmodel import Session, col, select

from skyrl_tx.artifacts import (
    ArtifactCorrupt,
    ArtifactMissing,
    ArtifactStore,
    ArtifactsUnreachable,
    InvalidLocation,
    open_bucket,
    read_recorded_url,
)
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import Progress, Record, confirm, format_bytes
from skyrl_tx.store import checkpoints, identity
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, SamplingSessionRow, SnapshotRow
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "fuse.sshfs"})
_LOST = {"tmpfs": "in memory: a restart of the machine loses everything", "overlay": "a container's own layer"}
_NUM_WRITES = 20
_BLOCK = bytes(4096)
_SLOW_FSYNC_S = 0.02
"""Median time of an fsync above which the disk bounds the speed of small requests."""
_SLOW_PROBE_S = 2.0
"""Time of five small requests above which the object store is far away."""
_LITTLE_BYTES = 10 * 2**30
_FEW_FILES = 10_000


def check_data_dir(subject: ExaminedServer) -> Iterator[Finding]:
    """Check the data directory: owner, file system, free space and the time of an fsync."""
    data_dir = subject.settings.data_dir
    place = _find_existing(data_dir)
    if not place.is_dir():
        yield error("disk", f"{place} is no directory", "choose another --data-dir")
        return
    owner = place.stat().st_uid
    if data_dir.is_dir() and owner != os.geteuid():
        yield warning(
            "disk",
            f"{data_dir} belongs to user {owner}, this is user {os.geteuid()}",
            "run the server, and this command, as the owner of the directory",
        )
    yield from _check_file_system(data_dir, _find_file_system(place))
    yield from _check_space(place, subject.settings.make_engine_settings().min_free_disk_bytes)
    try:
        times = _measure_fsync(place)
    except OSError as problem:
        what = f"{data_dir} cannot be written" if data_dir.is_dir() else f"{data_dir} cannot be created in {place}"
        yield error("disk", f"{what}: {problem.strerror}", "change its owner or mode, or choose another --data-dir")
        return
    median, slowest = statistics.median(times), max(times)
    shown = f"an fsync takes {1000 * median:.1f} ms, the slowest of {len(times)} {1000 * slowest:.1f} ms"
    if median > _SLOW_FSYNC_S:
        yield warning("disk", shown, "every request waits for one: use a local SSD for the data directory")
    else:
        yield ok("disk", shown)


def _find_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _find_file_system(place: Path) -> str:
    """Return the type of the file system of a directory, by the mount with the longest path; empty if unknown."""
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    resolved = place.resolve()
    found = [
        (len(fields[4]), fields[fields.index("-") + 1])
        for fields in mounts
        if resolved.is_relative_to(fields[4].replace("\\040", " "))
    ]
    return max(found, default=(0, ""))[1]


def _check_file_system(data_dir: Path, name: str) -> Iterator[Finding]:
    if name in _NETWORK:
        yield warning(
            "disk",
            f"{data_dir} is on a network file system ({name})",
            "use a local disk: SQLite needs shared memory and reliable locks, and each commit waits for an fsync",
        )
    elif name in _LOST:
        yield warning("disk", f"{data_dir} is on {name}, {_LOST[name]}", "use a volume or a directory of a disk")
    elif name:
        yield ok("disk", f"{data_dir} is on {name}")


def _check_space(place: Path, min_free_bytes: int) -> Iterator[Finding]:
    found = os.statvfs(place)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    shown = f"{format_bytes(free)} of {format_bytes(total)} are free"
    advice = "delete checkpoints, lower --trash-retention-s, or enlarge the disk"
    if free < min_free_bytes:
        yield error("disk", f"{shown}, less than 1 GiB: saves fail", advice)
    elif free < min_free_bytes + _LITTLE_BYTES:
        yield warning("disk", f"{shown}; saves fail below {format_bytes(min_free_bytes)}", advice)
    else:
        yield ok("disk", shown)
    if found.f_files and found.f_favail < _FEW_FILES:  # some file systems count no files
        yield warning(
            "disk", f"only {found.f_favail} more files can be created", "remove small files of other programs"
        )


def _measure_fsync(directory: Path) -> list[float]:
    """Return how long it takes to write and fsync a block, several times. Raises OSError if that is not possible."""
    times: list[float] = []
    with tempfile.TemporaryFile(dir=directory, prefix=".doctor-", buffering=0) as file:
        for _ in range(_NUM_WRITES):
            started = time.perf_counter()
            file.write(_BLOCK)
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
    return times


def check_compile_cache(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that the directory of compiled programs can be written."""
    directory: Path | None = getattr(subject.settings.backend_config, "compile_cache_dir", None)
    if directory is None:
        return
    place = _find_existing(directory.expanduser().absolute())
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        yield ok("cache", f"compiled programs in {directory}")
    else:
        yield error(
            "cache",
            f"the directory of compiled programs, {directory}, cannot be written",
            "set --backend-config.compile-cache-dir or XDG_CACHE_HOME to a directory that can",
        )


def check_object_store(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that the object store can be written, listed, read and cleared, and that objects are created once."""
    settings = subject.settings
    url = settings.artifacts or read_recorded_url(settings.data_dir)
    if url is None:
        return
    started = time.monotonic()
    try:
        creates_once = open_bucket(settings.data_dir, url).probe()
    except InvalidLocation as problem:
        yield error("storage", str(problem), "see the guide: object storage")
        return
    except ArtifactsUnreachable as problem:
        advice = "check the bucket, the credentials and the endpoint in the provider's environment variables"
        yield error("storage", f"{url}: {problem}", advice)
        return
    elapsed = time.monotonic() - started
    if not creates_once:
        advice = "use a store with conditional writes (If-None-Match), which the manifest of an artifact needs"
        yield error("storage", f"{url}: an object was created twice", advice)
    elif elapsed > _SLOW_PROBE_S:
        yield warning(
            "storage",
            f"{url} can be written, and is slow: {elapsed:.1f} s for five small requests",
            "use a store in the same region",
        )
    else:
        yield ok("storage", f"{url} can be written; five small requests take {1000 * elapsed:.0f} ms")


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
