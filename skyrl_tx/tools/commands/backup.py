"""`skyrl-tx backup` and `skyrl-tx restore`.

A backup is a directory with these files:

- `backup.json` lists all other files with their hashes.
- `database-<time>-<random>` is the copy of the database.
- `signing.key` signs tokens and download URLs of the server. It is missing if no API process has created it yet.
- `artifacts/` holds the weights that the database refers to.

Artifacts are immutable, so the next backup into the same directory adds only new ones. `backup.json` is replaced last.
An interrupted backup therefore leaves the previous backup intact.
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
from dataclasses import dataclass, field, replace
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
from skyrl_tx.launch.command_line import Progress, finish_parser, format_time, open_database, parse_path
from skyrl_tx.process.text import format_bytes
from skyrl_tx.store import checkpoints, database, identity, sampling_sessions
from skyrl_tx.store.database import Store

_MANIFEST = "backup.json"
_KEY = "signing.key"
_ARTIFACTS = "artifacts"
_TEMPORARY = ".tmp-"


class _Backup(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `backup.json`."""

    version: int = 1
    release: str
    created_at: float
    is_postgresql: bool
    database: str
    """The name of the copied database."""
    identity: Identity
    left_out: dict[str, str]
    """Artifacts that were missing or damaged, each with the reason."""
    files: dict[str, FileHash]
    """Size and hash of each file, by its path relative to the directory of the backup."""


@dataclass(slots=True)
class _CopiedFiles:
    """The artifacts of a backup after copying."""

    files: dict[str, FileHash] = field(default_factory=dict[str, FileHash])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    num_new: int = 0
    new_bytes: int = 0
    num_replaced: int = 0
    """Hard links of the previous backup that are now copies."""
    replaced_bytes: int = 0


def add_backup_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `backup`."""
    parser.description = (
        "Copy the database, the weights it refers to, and the signing key into a directory. The server may keep "
        "running. If the directory already holds a backup, it is updated, and only new weights are copied. On the "
        "file system of the data directory, the weights of the backup are hard links: they take no space, but "
        "damage to the disk affects both. --copy makes real copies, and replaces the links of an earlier backup. A "
        "PostgreSQL database is copied with pg_dump. The exit status is 1 if weights were damaged or missing."
    )
    parser.add_argument(
        "directory", metavar="DIR", type=parse_path, help="a new directory, or a directory that holds a backup"
    )
    parser.add_argument("--copy", action="store_true", help="always copy the weights instead of making hard links")
    finish_parser(parser, _backup)


def add_restore_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `restore`."""
    parser.description = (
        "Check the hashes of a backup and create a data directory from it. For a backup of PostgreSQL, name an empty "
        "database with --database-url; pg_restore fills it."
    )
    parser.add_argument("directory", metavar="DIR", type=parse_path, help="the directory of the backup")
    finish_parser(parser, _restore)


def _backup(arguments: argparse.Namespace) -> int:
    target: Path = arguments.directory
    data_dir: Path = arguments.data_dir
    if url := arguments.artifacts or read_recorded_url(data_dir):
        raise CommandError(
            f"the weights are in the object store {url}, which this command does not copy. Enable versioning or "
            "replication there, and copy only the database (with pg_dump, or with SQLite's .backup)"
        )

    with open_database(arguments, accepts_older=True) as store, _lock_target(target):
        earlier = _read(target) if (target / _MANIFEST).exists() else None
        database_name = f"database-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        artifacts = LocalArtifacts(data_dir / _ARTIFACTS)

        # Copy the database and link its artifacts while the server cannot remove any, then copy the artifacts.
        with artifacts.create_temporary() as staged:
            with artifacts.pin():
                content = _copy_database(store, artifacts, target / f"{_TEMPORARY}{database_name}")
                left_out = _stage(artifacts, content, staged)
            copied = _copy_artifacts(staged, target, earlier, is_copy=arguments.copy)

        # Put the copied database and the signing key in place.
        copied_database = target / f"{_TEMPORARY}{database_name}"
        copied_database.chmod(0o600)
        _fsync(copied_database)
        copied_database.rename(target / database_name)
        _copy_key(data_dir, target)
        copied.left_out.update(left_out)
        for name in (database_name, *([_KEY] if (target / _KEY).exists() else [])):
            copied.files[name] = hash_file(target / name)

        # Replace the manifest last: it completes the backup.
        backup = _Backup(
            release=__version__,
            created_at=time.time(),
            is_postgresql=content.is_postgresql,
            database=database_name,
            identity=content.identity,
            left_out=copied.left_out,
            files=copied.files,
        )
        _write(target, backup)
        _remove_stale_files(target, backup)

    if store.is_older:
        print(f"an older release wrote the database: the backup has its schema, and all artifacts of {data_dir}")
    size = format_bytes(copied.files[database_name].size_bytes)
    print(
        f"backed up {data_dir} to {target}: a database of {size} and {len(_list_artifact_ids(backup))} artifacts, "
        f"including {copied.num_new} new ones ({format_bytes(copied.new_bytes)})"
    )
    if copied.num_replaced:
        size = format_bytes(copied.replaced_bytes)
        print(f"replaced {copied.num_replaced} hard links of the previous backup with copies ({size})")
    for artifact_id, why in copied.left_out.items():
        print(f"left out {artifact_id}: {why}")
    return 1 if copied.left_out else 0


@dataclass(frozen=True, slots=True)
class _DatabaseContent:
    """The facts about the copied database that the rest of the backup needs."""

    referenced: Collection[ArtifactId]
    ephemeral: Collection[ArtifactId]
    identity: Identity
    is_postgresql: bool


def _copy_database(store: Store, artifacts: LocalArtifacts, target: Path) -> _DatabaseContent:
    """Copy the database, and return the artifacts to back up.

    These are the artifacts that the copy refers to, and the unclaimed artifacts, which `skyrl-tx recover` can restore.
    If an older release wrote the database, these are all artifacts: this release cannot read what that one refers to.
    """

    def read_older_content(tx: Session) -> _DatabaseContent:
        present = frozenset(artifacts.list_ids())
        return _DatabaseContent(
            referenced=present,
            ephemeral=present,
            identity=artifacts.read_identity() or Identity(store_id="", epoch=0),
            is_postgresql=tx.get_bind().dialect.name == "postgresql",
        )

    def read_content(tx: Session) -> _DatabaseContent:
        row = identity.get(tx)
        referenced = checkpoints.find_referenced_artifacts(tx)
        if referenced is None:
            raise CommandError(
                "a pending load_weights request is damaged, so the weights that it needs are unknown; try again later"
            )
        return _DatabaseContent(
            referenced=referenced,
            ephemeral={ArtifactId(session.sampler_id) for session in sampling_sessions.list_ephemeral(tx)},
            identity=Identity(store_id=row.store_id if row else "", epoch=row.epoch if row else 0),
            is_postgresql=tx.get_bind().dialect.name == "postgresql",
        )

    if store.is_older:
        return store.copy(target, read_older_content)
    unclaimed = identity.find_unclaimed(store, artifacts)
    content = store.copy(target, read_content)
    kept = tuple(sorted(unclaimed - set(content.referenced)))
    claimed = Identity(store_id=content.identity.store_id, epoch=content.identity.epoch, unclaimed=kept)
    return replace(content, referenced={*content.referenced, *kept}, identity=claimed)


def _stage(artifacts: LocalArtifacts, content: _DatabaseContent, staged: Path) -> dict[str, str]:
    """Link the files of all artifacts into `staged`. Return each missing or damaged artifact with the reason."""
    missing: dict[str, str] = {}
    for artifact_id in sorted(content.referenced):
        try:
            source = artifacts.describe(artifact_id).path
        except ArtifactMissing as error:
            # An ephemeral sampler may not be written yet; the engine creates it again from the request log.
            if artifact_id not in content.ephemeral:
                missing[artifact_id] = str(error)
        except ArtifactCorrupt as error:
            missing[artifact_id] = str(error)
        else:
            _copy_tree(source, staged / artifact_id, is_copy=False)
    return missing


def _copy_artifacts(staged: Path, target: Path, earlier: _Backup | None, *, is_copy: bool) -> _CopiedFiles:
    """Copy or link the artifacts that the previous backup does not have, and check their hashes.

    Damaged artifacts are left out of the backup. With `is_copy`, hard links of the previous backup become copies.
    """
    copied = _CopiedFiles()
    known = _list_artifact_ids(earlier) if earlier is not None else set[str]()
    sources = sorted(staged.iterdir())
    kept = [source.name for source in sources if source.name in known and (target / _ARTIFACTS / source.name).is_dir()]
    links = {name: _list_hard_links(target / _ARTIFACTS / name) if is_copy else [] for name in kept}
    total = sum(_count_tree_bytes(source) for source in sources if source.name not in links)
    progress = Progress("copied", total + sum(path.stat().st_size for paths in links.values() for path in paths))
    (target / _ARTIFACTS).mkdir(mode=0o700, exist_ok=True)

    for source in sources:
        destination = target / _ARTIFACTS / source.name

        # Keep what the previous backup has.
        if earlier is not None and source.name in links:
            for path in links[source.name]:
                _replace_with_copy(path, target / f"{_TEMPORARY}copy")
                copied.num_replaced += 1
                copied.replaced_bytes += path.stat().st_size
                progress.add(path.stat().st_size)
            prefix = f"{_ARTIFACTS}/{source.name}/"
            copied.files.update({name: file for name, file in earlier.files.items() if name.startswith(prefix)})
            continue

        # Copy to a temporary name and check the copy.
        shutil.rmtree(destination, ignore_errors=True)
        temporary = target / _ARTIFACTS / f"{_TEMPORARY}{source.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        _copy_tree(source, temporary, is_copy=is_copy)
        try:
            open_artifact(temporary)
        except ArtifactCorrupt as error:
            copied.left_out[source.name] = str(error).replace(_TEMPORARY, "")
            shutil.rmtree(temporary)
            continue

        # Move it into the backup; `open_artifact` has just verified the recorded hashes.
        temporary.rename(destination)
        for name, file in read_file_hashes(destination).items():
            copied.files[f"{_ARTIFACTS}/{source.name}/{name}"] = file
        copied.num_new += 1
        copied.new_bytes += _count_tree_bytes(destination)
        progress.add(_count_tree_bytes(destination))
    progress.close()
    return copied


def _restore(arguments: argparse.Namespace) -> None:
    source: Path = arguments.directory
    data_dir: Path = arguments.data_dir
    url: str | None = arguments.database_url or None
    backup = _read(source)

    # Refuse targets that do not fit the backup.
    if backup.is_postgresql and (url is None or url.startswith("sqlite:")):
        raise CommandError(f"{source} is a backup of PostgreSQL: name an empty database with --database-url")
    if not backup.is_postgresql and url is not None:
        raise CommandError(f"{source} is a backup of SQLite, which is restored into --data-dir; omit --database-url")
    if data_dir.exists() and any(data_dir.iterdir()):
        raise CommandError(f"--data-dir {data_dir} is not empty; restore into a new directory")
    _verify(source, backup)

    # Complete the data directory under a temporary name and rename it, so that no server starts on a part of it.
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=data_dir.parent, prefix=f".{data_dir.name}-"))
    try:
        (temporary / _ARTIFACTS).mkdir(mode=0o700)  # `mkdir` below gives parents the default mode
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

    made_at = format_time(backup.created_at)
    print(f"restored the backup of {made_at} to {data_dir}")
    where = f"--data-dir {data_dir}" + ("" if url is None else " --database-url URL")
    print(
        f"API keys are as they were then: keys that were revoked after {made_at} are valid again. Before you start the "
        f"server, look at `skyrl-tx keys list {where}` and run `skyrl-tx keys revoke` for these keys"
        + ("" if url is None else "; URL is the database of this restore, also in SKYRL_TX_DATABASE_URL")
    )
    for artifact_id, why in backup.left_out.items():
        print(f"not in the backup: {artifact_id}: {why}")


def _verify(source: Path, backup: _Backup) -> None:
    """Compare all files with their hashes. Raises CommandError, which names each missing or changed file."""
    progress = Progress("checked", sum(file.size_bytes for file in backup.files.values()))
    bad: list[str] = []
    for name, file in backup.files.items():
        path = source / name
        if not path.is_file():
            bad.append(f"{path} is missing")
        elif hash_file(path) != file:
            bad.append(f"{path} has changed since the backup was written")
        progress.add(file.size_bytes)
    progress.close()
    if bad:
        raise CommandError("\n".join((*bad, "nothing was restored")))


def _read(target: Path) -> _Backup:
    try:
        backup = msgspec.json.decode((target / _MANIFEST).read_bytes(), type=_Backup)
    except FileNotFoundError:
        raise CommandError(f"{target} is not a backup: it has no {_MANIFEST}") from None
    except msgspec.DecodeError as error:
        raise CommandError(f"{target / _MANIFEST} cannot be read: {error}") from error
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in backup.files):
        raise CommandError(f"{target / _MANIFEST} names files outside the backup")
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
    """Remove databases and artifacts that only earlier or interrupted backups need."""
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
    """Create the directory, and lock it against a second backup that runs at the same time.

    Raises CommandError if another backup holds the lock, or if the directory has files but no backup.
    """
    if target.exists() and not target.is_dir():
        raise CommandError(f"{target} is not a directory")
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{target}: another `skyrl-tx backup` is writing to this directory") from None
        prefixes = ("database-", _TEMPORARY, _ARTIFACTS, _KEY)  # of an interrupted first backup
        if not (target / _MANIFEST).exists() and any(not path.name.startswith(prefixes) for path in target.iterdir()):
            raise CommandError(f"{target} has files but is not a backup; choose a new directory")
        yield
    finally:
        os.close(descriptor)


def _copy_key(data_dir: Path, target: Path) -> None:
    key, copied_key = data_dir / _KEY, target / _KEY
    if key.is_file() and not (copied_key.is_file() and copied_key.read_bytes() == key.read_bytes()):
        temporary = target / f"{_TEMPORARY}{_KEY}"
        temporary.touch(mode=0o600)
        _copy_file(key, temporary)
        temporary.rename(copied_key)


def _copy_tree(source: Path, target: Path, *, is_copy: bool) -> None:
    """Make hard links to all files of a directory, or copy them if `is_copy` is set or if links are not possible."""
    for path in _list_files(source):
        destination = target / path.relative_to(source)
        destination.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_copy:
            try:
                os.link(path, destination)
                continue
            except OSError:  # the target is on another file system, or the file system has no hard links
                pass
        _copy_file(path, destination)


def _replace_with_copy(path: Path, temporary: Path) -> None:
    """Replace a hard link with a copy of its content. The file is complete at any time."""
    _copy_file(path, temporary)
    temporary.rename(path)
    _fsync(path.parent)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file and fsync it. Only its owner can read the copy."""
    shutil.copyfile(source, target)
    target.chmod(0o600)
    _fsync(target)


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _list_hard_links(folder: Path) -> list[Path]:
    return [path for path in _list_files(folder) if path.stat().st_nlink > 1]


def _count_tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _list_files(folder))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
