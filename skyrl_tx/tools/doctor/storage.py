"""Checks of storage: the data directory and its disk, the compile cache, the object store, and all artifacts."""

import errno
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
from skyrl_tx.launch.command_line import Progress, Record, confirm
from skyrl_tx.process.text import format_bytes
from skyrl_tx.store import checkpoints, identity
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, SamplingSessionRow, SnapshotRow
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "fuse.sshfs"})
_VOLATILE = {
    "tmpfs": "which is in memory: a restart of the machine loses everything",
    "overlay": "the layer of a container: removing the container loses everything",
}
_NUM_WRITES = 20
_BLOCK = bytes(4096)
_SLOW_FSYNC_S = 0.02
"""With a median fsync time above this, the disk limits the rate of small requests."""
_SLOW_PROBE_S = 2.0
"""An object store that takes longer than this for five small requests is slow."""
_LITTLE_BYTES = 10 * 2**30
_FEW_FILES = 10_000
_RESTORE = "restore a backup, or see `skyrl-tx recover --list`"
_EPHEMERAL = "ephemeral sampler of "


def check_data_dir(subject: ExaminedServer) -> Iterator[Finding]:
    """Check the data directory: owner, file system, free space and the time of an fsync.

    If the directory does not exist yet, its nearest existing parent is checked.
    """
    data_dir = subject.settings.data_dir
    directory = _find_existing(data_dir)
    if not directory.is_dir():
        yield error("disk", f"{directory} is not a directory", "choose another --data-dir")
        return

    # Owner, file system and space.
    owner = directory.stat().st_uid
    if data_dir.is_dir() and owner != os.geteuid():
        yield warning(
            "disk",
            f"{data_dir} belongs to user {owner}, but this is user {os.geteuid()}",
            "run the server and this command as the owner of the directory",
        )
    yield from _check_file_system(data_dir, _find_file_system(directory))
    yield from _check_space(directory, subject.settings.make_engine_settings().min_free_disk_bytes)

    # Can it be written, and how fast?
    try:
        times = _measure_fsync(directory)
    except OSError as problem:
        what = f"{data_dir} cannot be written" if data_dir.is_dir() else f"{data_dir} cannot be created in {directory}"

        # A read-only file system needs other advice.
        is_readonly = problem.errno == errno.EROFS
        advice = "mount the file system with write access" if is_readonly else "change its owner or mode"
        yield error("disk", f"{what}: {problem.strerror}", f"{advice}, or choose another --data-dir")
        return
    median, slowest = statistics.median(times), max(times)
    message = (
        f"an fsync takes {1000 * median:.1f} ms (median of {len(times)}; the slowest took {1000 * slowest:.1f} ms)"
    )
    if median > _SLOW_FSYNC_S:
        yield warning("disk", message, "every request waits for an fsync: put the data directory on a local SSD")
    else:
        yield ok("disk", message)


def _find_existing(path: Path) -> Path:
    """Return the path itself if it exists, else its nearest existing parent."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _find_file_system(directory: Path) -> str:
    """Return the type of the file system of a directory, for example ext4. Empty if it is unknown.

    Of all mounts that contain the directory, the one with the longest path counts.
    """
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    resolved = directory.resolve()
    containing = [
        (len(fields[4]), fields[fields.index("-") + 1])
        for fields in mounts
        if resolved.is_relative_to(fields[4].replace("\\040", " "))
    ]
    return max(containing, default=(0, ""))[1]


def _check_file_system(data_dir: Path, name: str) -> Iterator[Finding]:
    if name in _NETWORK:
        yield warning(
            "disk",
            f"{data_dir} is on a network file system ({name})",
            "use a local disk: SQLite needs shared memory and reliable locks, and every commit waits for an fsync",
        )
    elif name in _VOLATILE:
        yield warning("disk", f"{data_dir} is on {name}, {_VOLATILE[name]}", "use a volume or a directory on a disk")
    elif name:
        yield ok("disk", f"{data_dir} is on {name}")


def _check_space(directory: Path, min_free_bytes: int) -> Iterator[Finding]:
    stats = os.statvfs(directory)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    message = f"{format_bytes(free)} of {format_bytes(total)} are free"
    advice = "delete checkpoints, or enlarge the disk"
    if free < min_free_bytes:
        yield error("disk", f"{message}; saving weights fails below {format_bytes(min_free_bytes)}", advice)
    elif free < min_free_bytes + _LITTLE_BYTES:
        yield warning("disk", f"{message}; saving weights will fail below {format_bytes(min_free_bytes)}", advice)
    else:
        yield ok("disk", message)
    if stats.f_files and stats.f_favail < _FEW_FILES:  # `f_files` is 0 on file systems that do not count files
        yield warning(
            "disk", f"only {stats.f_favail} more files can be created", "remove small files of other programs"
        )


def _measure_fsync(directory: Path) -> list[float]:
    """Write and fsync a 4 KiB block 20 times, and return the seconds of each. Raises OSError if that fails."""
    times: list[float] = []
    with tempfile.TemporaryFile(dir=directory, prefix=".doctor-", buffering=0) as file:
        for _ in range(_NUM_WRITES):
            started = time.perf_counter()
            file.write(_BLOCK)
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
    return times


def check_compile_cache(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that the compile cache can be written."""
    directory: Path | None = getattr(subject.settings.backend_config, "compile_cache_dir", None)
    if directory is None:
        return
    existing = _find_existing(directory.expanduser().absolute())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        yield ok("cache", f"compiled programs are kept in {directory}")
    else:
        yield error(
            "cache",
            f"the compile cache {directory} cannot be written",
            "set --backend-config.compile-cache-dir or XDG_CACHE_HOME to a writable directory",
        )


def check_object_store(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that objects can be created, listed, read and deleted, and that a second create of an object is refused."""
    settings = subject.settings
    url = settings.artifacts or read_recorded_url(settings.data_dir)
    if url is None:
        return

    # Make five small requests.
    started = time.monotonic()
    try:
        creates_once = open_bucket(settings.data_dir, url).probe()
    except InvalidLocation as problem:
        yield error("storage", str(problem), "see the guide on object storage")
        return
    except ArtifactsUnreachable as problem:
        advice = "check the bucket, the credentials and the endpoint in the provider's environment variables"
        yield error("storage", f"{url}: {problem}", advice)
        return
    elapsed = time.monotonic() - started

    if not creates_once:
        advice = "use a store with conditional writes (If-None-Match); artifacts are not safe without them"
        yield error("storage", f"{url} does not refuse to create an object that exists already", advice)
    elif elapsed > _SLOW_PROBE_S:
        yield warning(
            "storage",
            f"{url} can be written but is slow: five small requests took {elapsed:.1f} s",
            "use a store in the same region",
        )
    else:
        yield ok("storage", f"{url} can be written; five small requests took {1000 * elapsed:.0f} ms")


@dataclass(slots=True)
class ArtifactReport:
    """The state of the database and of each artifact."""

    damage: str | None = None
    """The first damage that was found in the database, or None."""
    is_foreign: bool = False
    """Whether the artifacts may belong to another database."""
    records: list[Record] = field(default_factory=list[Record])
    num_trashed: int = 0

    def add(self, artifact_id: ArtifactId, state: str, num_bytes: int, used_by: str | None, detail: str = "") -> None:
        """Add one artifact."""
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
    """Turn a report into findings."""
    # The database.
    if report.damage is not None:
        yield error("database", f"it is damaged: {report.damage}", _RESTORE)
    if report.is_foreign:
        yield warning(
            "artifacts",
            "the database does not match the artifacts: it is new, was restored from an older backup, or belongs to "
            "other artifacts. The server keeps all artifacts that it does not know",
            "check that this is the right database; if it was lost, `skyrl-tx recover` restores checkpoints",
        )

    # The artifacts.
    states = Counter(str(record["state"]) for record in report.records)
    size = format_bytes(sum(int(str(record["bytes"])) for record in report.records))
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none"
    yield ok("artifacts", f"{counts}; {size}; {report.num_trashed} more in the trash")
    if num_lost := states["missing"] + states["damaged"]:
        yield error("artifacts", f"{num_lost} are missing or damaged", _RESTORE)
    if states["unclaimed"]:
        advice = "`skyrl-tx recover` restores checkpoints, `skyrl-tx doctor --remove-unclaimed` moves all to the trash"
        yield warning("artifacts", f"{states['unclaimed']} are unclaimed: the database does not know them", advice)


def examine_artifacts(store: Store, artifacts: ArtifactStore, *, with_hashes: bool) -> ArtifactReport:
    """Check the database, all artifacts that a row refers to, and all artifacts that exist.

    Hashes of local artifacts are checked if `with_hashes`. For artifacts in an object store only the sizes of files are
    compared, because their hashes are checked whenever they are read.
    """
    # The database, and whether the artifacts belong to it. If neither has an identity, no engine of this release has
    # started yet, so there is nothing to compare.
    own, recorded = store.read(identity.get), artifacts.read_identity()
    present, trash = set(artifacts.list_ids()), set(artifacts.list_ids(trashed=True))
    is_comparable = bool(present) and (own is not None or recorded is not None)
    report = ArtifactReport(
        damage=store.find_damage(),
        is_foreign=is_comparable and not identity.is_current(own, recorded),
        num_trashed=len(trash),
    )

    # What refers to the artifacts, and how large they are.
    used, unclaimed = store.read(_find_references), identity.find_unclaimed(store, artifacts)
    sizes = {artifact_id: _measure_size(artifacts, artifact_id) for artifact_id in present}

    # All artifacts.
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
            if artifact_id not in store.read(_find_references):  # a running server has replaced it meanwhile
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
    """Return for each artifact in use a text that says which rows refer to it."""
    references: dict[ArtifactId, list[str]] = {}
    for row in tx.exec(select(CheckpointRow)):
        references.setdefault(row.artifact_id, []).append(str(row.path))
    for row in tx.exec(select(SnapshotRow)):
        references.setdefault(row.artifact_id, []).append(f"snapshot of {row.model_id}")

    # Sampling sessions refer to checkpoints, or to ephemeral samplers.
    samplers = select(SamplingSessionRow.sampler_id, SamplingSessionRow.model_id).where(
        col(SamplingSessionRow.sampler_id).is_not(None)
    )
    for sampler_id, model_id in tx.exec(samplers):
        uses = references.setdefault(ArtifactId(str(sampler_id)), [])
        if not uses:
            uses.append(f"{_EPHEMERAL}{model_id}" if model_id else "a sampling session")

    for artifact_id in checkpoints.find_referenced_artifacts(tx) or ():
        references.setdefault(artifact_id, ["a load_weights request"])
    return {artifact_id: ", ".join(uses) for artifact_id, uses in references.items()}


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


def remove_unclaimed(store: Store, artifacts: ArtifactStore, *, is_confirmed: bool) -> None:
    """Move the unclaimed artifacts to the trash. Raises CommandError if the user declines."""
    unclaimed = sorted(identity.find_unclaimed(store, artifacts))
    if not unclaimed:
        print("no unclaimed artifacts")
        return
    size = format_bytes(sum(_measure_size(artifacts, artifact_id) for artifact_id in unclaimed))
    if not is_confirmed and not confirm(f"move {len(unclaimed)} artifacts ({size}) to the trash?"):
        raise CommandError("nothing was moved")
    for artifact_id in unclaimed:
        artifacts.discard(artifact_id)
    print(f"moved {len(unclaimed)} artifacts ({size}) to the trash; the server removes them after --trash-retention-s")
