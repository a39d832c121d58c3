"""`skyrl-tx backup` and `skyrl-tx restore`: copies of the database and the weights.

A backup is a directory with `backup.json`, which lists all files with their hashes, the database, `signing.key`, and
the artifacts that the database refers to. Artifacts are immutable, so the next backup into the same directory adds only
new ones. `backup.json` is replaced last: an interrupted backup leaves the one before it as it was.
"""

import argparse
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from sqlmodel import Session

from skyrl_tx import __version__
from skyrl_tx.artifacts import (
    ArtifactCorrupt,
    ArtifactMissing,
    FileHash,
    Identity,
    LocalArtifacts,
    hash_file,
    open_artifact,
    read_file_hashes,
    read_recorded_url,
)
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import Progress, finish_parser, format_bytes, format_time, open_database, parse_path
from skyrl_tx.store import checkpoints, database, identity, sampling_sessions
from skyrl_tx.store.database import Store

_MANIFEST = "backup.json"
_KEY = "signing.key"
_ARTIFACTS = "artifacts"
_TEMPORARY = ".tmp-"


class _Backup(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `backup.json`. `files` maps relative paths to sizes and hashes."""

    version: int = 1
    release: str
    created_at: float
    is_postgresql: bool
    database: str
    identity: Identity
    left_out: dict[str, str]
    """Artifacts that were missing or damaged, and why."""
    files: dict[str, FileHash]


@dataclass(slots=True)
class _CopiedFiles:
    """The files of a backup, and what was new."""

    files: dict[str, FileHash] = field(default_factory=dict[str, FileHash])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    num_new: int = 0
    new_bytes: int = 0


def add_backup_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `backup`."""
    parser.description = (
        "Copy the database, the weights that it refers to, and the signing key into a directory, also while a server "
        "runs. An earlier backup in it is updated: artifacts that it has are not copied again. On the file system of "
        "the data directory weights are hard links, which take no space but share the disk's damages; --copy avoids "
        "this. PostgreSQL is copied with pg_dump. The exit status is 1 if artifacts were damaged or missing."
    )
    parser.add_argument("directory", metavar="DIR", type=parse_path, help="new directory, or one with a backup")
    parser.add_argument("--copy", action="store_true", help="copy the weights, never make hard links")
    finish_parser(parser, _backup)


def add_restore_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `restore`."""
    parser.description = (
        "Check the hashes of a backup and create a data directory from it. With a backup of PostgreSQL, --database-url "
        "names an empty database, which is filled with pg_restore."
    )
    parser.add_argument("directory", metavar="DIR", type=parse_path, help="directory of the backup")
    finish_parser(parser, _restore)


def _backup(arguments: argparse.Namespace) -> int:
    target: Path = arguments.directory
    data_dir: Path = arguments.data_dir
    if url := arguments.artifacts or read_recorded_url(data_dir):
        raise CommandError(
            f"the weights are in {url}, which a backup does not copy: let the object store keep versions or replicas, "
            "and copy the database alone (pg_dump, or SQLite's .backup)"
        )
    with open_database(arguments) as store, _lock_target(target):
        earlier = _read(target) if (target / _MANIFEST).exists() else None
        database_name = f"database-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        artifacts = LocalArtifacts(data_dir / _ARTIFACTS)
        with artifacts.create_temporary() as staged:
            with artifacts.pin():  # until all artifacts of the copied database have a second name
                look = _copy_database(store, artifacts, target / f"{_TEMPORARY}{database_name}")
                left_out = _stage(artifacts, look, staged)
            copied = _copy_artifacts(staged, target, earlier, is_copy=arguments.copy)
        copied_database = target / f"{_TEMPORARY}{database_name}"
        copied_database.chmod(0o600)
        _fsync(copied_database)
        copied_database.rename(target / database_name)
        _copy_key(data_dir, target)
        copied.left_out.update(left_out)
        for name in (database_name, *([_KEY] if (target / _KEY).exists() else [])):
            copied.files[name] = hash_file(target / name)
        backup = _Backup(
            release=__version__,
            created_at=time.time(),
            is_postgresql=look.is_postgresql,
            database=database_name,
            identity=look.identity,
            left_out=copied.left_out,
            files=copied.files,
        )
        _write(target, backup)
        _remove_stale_files(target, backup)
    size = format_bytes(copied.files[database_name].size_bytes)
    print(
        f"backed up {data_dir} to {target}: a database of {size} and {len(_list_artifact_ids(backup))} artifacts, of which "
        f"{copied.num_new} are new ({format_bytes(copied.new_bytes)})"
    )
    for artifact_id, why in copied.left_out.items():
        print(f"left out {artifact_id}: {why}")
    return 1 if copied.left_out else 0


@dataclass(frozen=True, slots=True)
class _DatabaseContent:
    """Content of the copied database."""

    referenced: Collection[ArtifactId]
    ephemeral: Collection[ArtifactId]
    identity: Identity
    is_postgresql: bool


def _copy_database(store: Store, artifacts: LocalArtifacts, target: Path) -> _DatabaseContent:
    """Copy the database, and read the artifacts that the copy refers to; unclaimed ones are added."""

    def look(tx: Session) -> _DatabaseContent:
        row = identity.get(tx)
        referenced = checkpoints.find_referenced_artifacts(tx)
        if referenced is None:
            raise CommandError("a pending load request is damaged, and its artifact is unknown; try again later")
        return _DatabaseContent(
            referenced=referenced,
            ephemeral={ArtifactId(each.sampler_id) for each in sampling_sessions.list_ephemeral(tx)},
            identity=Identity(store_id=row.store_id if row else "", epoch=row.epoch if row else 0),
            is_postgresql=tx.get_bind().dialect.name == "postgresql",
        )

    unclaimed = identity.find_unclaimed(store, artifacts)
    found = store.copy(target, look)
    kept = tuple(sorted(unclaimed - set(found.referenced)))
    return _DatabaseContent(
        referenced={*found.referenced, *kept},
        ephemeral=found.ephemeral,
        identity=Identity(store_id=found.identity.store_id, epoch=found.identity.epoch, unclaimed=kept),
        is_postgresql=found.is_postgresql,
    )


def _stage(artifacts: LocalArtifacts, look: _DatabaseContent, staged: Path) -> dict[str, str]:
    """Give each artifact a second name in `staged`; return the ids of missing ones, and why."""
    missing: dict[str, str] = {}
    for artifact_id in sorted(look.referenced):
        try:
            source = artifacts.describe(artifact_id).path
        except ArtifactMissing as error:
            if artifact_id not in look.ephemeral:  # those that are not written yet are replayed from the log
                missing[artifact_id] = str(error)
        except ArtifactCorrupt as error:
            missing[artifact_id] = str(error)
        else:
            _copy_tree(source, staged / artifact_id, is_copy=False)
    return missing


def _copy_artifacts(staged: Path, target: Path, earlier: _Backup | None, *, is_copy: bool) -> _CopiedFiles:
    """Copy or link the artifacts that the backup lacks, and check their hashes."""
    copied = _CopiedFiles()
    known = _list_artifact_ids(earlier) if earlier is not None else set[str]()
    sources = sorted(staged.iterdir())
    progress = Progress("copied", sum(_count_tree_bytes(source) for source in sources if source.name not in known))
    (target / _ARTIFACTS).mkdir(mode=0o700, exist_ok=True)
    for source in sources:
        place = target / _ARTIFACTS / source.name
        if earlier is not None and source.name in known and place.is_dir():
            prefix = f"{_ARTIFACTS}/{source.name}/"
            copied.files.update({name: file for name, file in earlier.files.items() if name.startswith(prefix)})
            continue
        shutil.rmtree(place, ignore_errors=True)
        temporary = target / _ARTIFACTS / f"{_TEMPORARY}{source.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        _copy_tree(source, temporary, is_copy=is_copy)
        try:
            open_artifact(temporary)
        except ArtifactCorrupt as error:
            copied.left_out[source.name] = str(error).replace(_TEMPORARY, "")
            shutil.rmtree(temporary)
            continue
        temporary.rename(place)
        for name, file in read_file_hashes(place).items():  # their hashes were checked above
            copied.files[f"{_ARTIFACTS}/{source.name}/{name}"] = file
        copied.num_new += 1
        copied.new_bytes += _count_tree_bytes(place)
        progress.add(_count_tree_bytes(place))
    progress.close()
    return copied


def _restore(arguments: argparse.Namespace) -> int:
    source: Path = arguments.directory
    data_dir: Path = arguments.data_dir
    url: str | None = arguments.database_url or None
    backup = _read(source)
    is_sqlite_url = url is not None and url.startswith("sqlite:")
    if backup.is_postgresql != (url is not None and not is_sqlite_url):
        wanted = "--database-url of an empty PostgreSQL database" if backup.is_postgresql else "no --database-url"
        raise CommandError(f"{source}: is a backup of {'PostgreSQL' if backup.is_postgresql else 'SQLite'}; {wanted}")
    if is_sqlite_url:
        raise CommandError("--database-url: a backup of SQLite is restored into --data-dir; omit the flag")
    if data_dir.exists() and any(data_dir.iterdir()):
        raise CommandError(f"--data-dir {data_dir}: is not empty; restore into a new directory")
    _verify(source, backup)
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    # Complete under a temporary name and then renamed, so that no server starts on a part.
    temporary = Path(tempfile.mkdtemp(dir=data_dir.parent, prefix=f".{data_dir.name}-"))
    try:
        for name in backup.files:
            if name != backup.database:
                (temporary / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _copy_file(source / name, temporary / name)
        artifacts = LocalArtifacts(temporary / _ARTIFACTS)
        if backup.identity.store_id:
            artifacts.write_identity(backup.identity)
        database.restore(source / backup.database, temporary, url)
        if data_dir.exists():
            data_dir.rmdir()
        temporary.rename(data_dir)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    print(f"restored the backup of {format_time(backup.created_at)} to {data_dir}")
    for artifact_id, why in backup.left_out.items():
        print(f"not in the backup: {artifact_id}: {why}")
    return 0


def _verify(source: Path, backup: _Backup) -> None:
    """Raise CommandError, naming each bad file, unless all files are as they were written."""
    progress = Progress("checked", sum(file.size_bytes for file in backup.files.values()))
    bad: list[str] = []
    for name, file in backup.files.items():
        path = source / name
        if not path.is_file():
            bad.append(f"{path}: is missing")
        elif hash_file(path) != file:
            bad.append(f"{path}: is not as it was written")
        progress.add(file.size_bytes)
    progress.close()
    if bad:
        raise CommandError("\n".join((*bad, "nothing was restored")))


def _read(target: Path) -> _Backup:
    try:
        backup = msgspec.json.decode((target / _MANIFEST).read_bytes(), type=_Backup)
    except FileNotFoundError:
        raise CommandError(f"{target}: is no backup, it has no {_MANIFEST}") from None
    except msgspec.DecodeError as error:
        raise CommandError(f"{target / _MANIFEST}: cannot be read ({error})") from error
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in backup.files):
        raise CommandError(f"{target / _MANIFEST}: names files outside the backup")
    return backup


def _write(target: Path, backup: _Backup) -> None:
    for folder in (target / _ARTIFACTS, target):
        _fsync(folder)
    temporary = target / f"{_TEMPORARY}{_MANIFEST}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(backup)))
    _fsync(temporary)
    temporary.rename(target / _MANIFEST)
    _fsync(target)


def _remove_stale_files(target: Path, backup: _Backup) -> None:
    """Remove the database and the artifacts that belong to earlier or interrupted backups only."""
    kept = _list_artifact_ids(backup)
    for path in (target / _ARTIFACTS).iterdir():
        if path.name not in kept:
            shutil.rmtree(path)
    for path in target.iterdir():
        if path.name.startswith(("database-", _TEMPORARY)) and path.name != backup.database:
            path.unlink()


def _list_artifact_ids(backup: _Backup) -> set[str]:
    return {name.split("/")[1] for name in backup.files if name.startswith(f"{_ARTIFACTS}/")}


@contextmanager
def _lock_target(target: Path) -> Generator[None]:
    """Create the directory and exclude another backup into it. Raises CommandError for one that is no backup."""
    if target.exists() and not target.is_dir():
        raise CommandError(f"{target}: is no directory")
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{target}: another backup into it is running") from None
        own = ("database-", _TEMPORARY, _ARTIFACTS, _KEY)
        if not (target / _MANIFEST).exists() and any(not path.name.startswith(own) for path in target.iterdir()):
            raise CommandError(f"{target}: has files that are no backup; choose a new directory")
        yield
    finally:
        os.close(descriptor)


def _copy_key(data_dir: Path, target: Path) -> None:
    key, place = data_dir / _KEY, target / _KEY
    if key.is_file() and not (place.is_file() and place.read_bytes() == key.read_bytes()):
        temporary = target / f"{_TEMPORARY}{_KEY}"
        temporary.touch(mode=0o600)
        _copy_file(key, temporary)
        temporary.rename(place)


def _copy_tree(source: Path, target: Path, *, is_copy: bool) -> None:
    """Make hard links to all files of a directory, or durable copies where that is impossible or not wanted."""
    for path in _list_files(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_copy:
            try:
                os.link(path, place)
                continue
            except OSError:  # another file system, or one without hard links
                pass
        _copy_file(path, place)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file durably, readable by its owner only."""
    shutil.copyfile(source, target)
    target.chmod(0o600)
    _fsync(target)


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _count_tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _list_files(folder))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
