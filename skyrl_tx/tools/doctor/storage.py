"""Checks of the places of data: the data directory and its disk, compiled programs, the object store."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from skyrl_tx.artifacts import ArtifactsUnreachable, InvalidLocation, open_bucket, read_recorded_url
from skyrl_tx.launch.command_line import format_bytes
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
