"""Checks of the data directory and of the compilation cache."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx.tools.doctor import storage
from skyrl_tx.tools.doctor.findings import Finding


def by_level(findings, level: str) -> list[Finding]:
    return [finding for finding in findings if finding.level == level]


def test_a_new_directory_on_a_fast_disk_is_fine(subject, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(storage, "_MOUNTS", Path("/nowhere"))
    monkeypatch.setattr(storage.os, "statvfs", lambda _: statvfs(free=2**40))
    monkeypatch.setattr(storage, "_SLOW_FSYNC_S", 60.0)
    findings = list(storage.check_data_dir(subject()))
    assert {finding.level for finding in findings} == {"ok"} and "an fsync takes" in findings[-1].message
    assert list(tmp_path.iterdir()) == [], "it creates nothing"


def statvfs(*, free: int, files: int = 10**9) -> SimpleNamespace:
    return SimpleNamespace(f_bavail=free, f_blocks=2**40, f_frsize=1, f_files=2 * files, f_favail=files)


@pytest.mark.parametrize(
    ("free", "files", "level", "text"),
    [
        (2**29, 10**9, "error", "saving weights fails below"),
        (2 * 2**30, 10**9, "warning", "saving weights will fail below 1.0 GiB"),
        (2**39, 5, "warning", "only 5 more files"),
    ],
)
def test_little_space_is_found(subject, monkeypatch, free: int, files: int, level: str, text: str) -> None:
    monkeypatch.setattr(storage.os, "statvfs", lambda _: statvfs(free=free, files=files))
    assert any(text in finding.message for finding in by_level(storage.check_data_dir(subject()), level))


def test_a_slow_fsync_is_found(subject, monkeypatch) -> None:
    monkeypatch.setattr(storage, "_measure_fsync", lambda _: [0.05] * 3)
    (found,) = [
        finding for finding in by_level(storage.check_data_dir(subject()), "warning") if "fsync" in finding.message
    ]
    assert "50.0 ms" in found.message


@pytest.mark.parametrize(("name", "text"), [("nfs4", "network file system (nfs4)"), ("tmpfs", "loses everything")])
def test_unsuitable_file_systems_are_found(subject, monkeypatch, tmp_path, name: str, text: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        f"40 22 0:45 / {tmp_path} rw,relatime shared:7 - {name} somewhere rw\n"
        "41 22 0:46 / /elsewhere rw - xfs /dev/sdb rw\n"
    )
    monkeypatch.setattr(storage, "_MOUNTS", mounts)
    assert any(text in finding.message for finding in by_level(storage.check_data_dir(subject()), "warning"))


def test_a_directory_that_cannot_be_created_is_an_error(subject, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    (found,) = by_level(storage.check_data_dir(subject("--data-dir", tmp_path / "file" / "data")), "error")
    assert "is not a directory" in found.message

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refuse)
    (found,) = by_level(storage.check_data_dir(subject()), "error")
    assert "cannot be created" in found.message and "Permission denied" in found.message


def test_another_owner_is_found(subject, monkeypatch, tmp_path) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(storage.os, "geteuid", lambda: os.getuid() + 1)
    assert any(
        "belongs to user" in finding.message for finding in by_level(storage.check_data_dir(subject()), "warning")
    )


def test_compile_cache(subject, monkeypatch, tmp_path) -> None:
    assert list(storage.check_compile_cache(subject("--backend", "fake"))) == []
    (found,) = storage.check_compile_cache(subject("--backend-config.compile-cache-dir", tmp_path / "cache"))
    assert found.level == "ok"
    monkeypatch.setattr(storage.os, "access", lambda *_: False)
    (found,) = storage.check_compile_cache(subject("--backend-config.compile-cache-dir", tmp_path / "cache"))
    assert found.level == "error" and "XDG_CACHE_HOME" in found.advice
