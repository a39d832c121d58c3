"""Data directories of earlier releases: nothing is lost, and runs continue with the results of that release."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path

import httpx
import numpy as np
import pytest

from skyrl_tx import __version__
from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.contract import codec, requests, results
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store.database import Store
from skyrl_tx.store.schema import HEAD
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.tools.cli import main
from tests.support.golden import (
    BASE_MODEL,
    GOLDEN,
    GoldenClient,
    Json,
    Record,
    continue_run,
    hash_arithmetic,
    read_golden,
)
from tests.support.live_api import live_api
from tests.support.live_engine import live_engine
from tests.support.old_schemas import use_next_release

FILES = sorted(GOLDEN.glob("*.tar.xz"))
SCHEMAS = dict(re.findall(r"\| `(\S+)` \|.*\| (\d{4}) \|", (GOLDEN / "README.md").read_text()))
"""The schema of each file, as the README says."""
OUTDATED = [file for file in FILES if SCHEMAS[file.name] != HEAD]


@contextmanager
def serve(data_dir: Path) -> Iterator[str]:
    """Serve a data directory with the current code and yield the URL."""
    api = ApiSettings(port=0, data_dir=data_dir, base_model=BASE_MODEL)
    engine = EngineSettings(data_dir=data_dir, base_model=BASE_MODEL)
    with live_api(api) as server, live_engine(engine, FakeBackend(BASE_MODEL, FakeConfig())):
        yield server.url


def assert_same(name: str, found: Json, recorded: Json, *, bit_equal: bool) -> None:
    """Compare results.

    Unless `bit_equal`, numbers may differ in the last bits, because the arithmetic has changed.
    """
    if bit_equal or name == "listed" or name.startswith("checkpoint"):
        assert found == recorded, name
    elif isinstance(recorded, dict):
        assert found.keys() == recorded.keys(), name
        for key, value in recorded.items():
            assert_same(f"{name} {key}", found[key], value, bit_equal=False)
    elif isinstance(recorded, list):
        assert len(found) == len(recorded), name
        for index, value in enumerate(recorded):
            assert_same(f"{name} {index}", found[index], value, bit_equal=False)
    elif isinstance(recorded, str):
        assert isinstance(found, str)  # a hash of weights
    else:
        np.testing.assert_allclose(found, recorded, rtol=1e-5, err_msg=name)


def test_the_current_release_has_a_golden_directory() -> None:
    assert GOLDEN / f"{__version__}.tar.xz" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".tar.xz"))
def test_runs_of_an_earlier_release_continue_with_its_own_numbers(file: Path, tmp_path: Path) -> None:
    data_dir, record = read_golden(file, tmp_path)
    with closing(sqlite3.connect(data_dir / "skyrl_tx.db")) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (SCHEMAS[file.name],)
    assert_decodable(data_dir)
    with serve(data_dir) as url:
        with closing(GoldenClient(url, record.keys.get("ann"))) as client:
            found = continue_run(client, record, data_dir)
        check_keys(url, record)
    assert found.keys() == record.results.keys()
    bit_equal = record.arithmetic == hash_arithmetic()
    for name, recorded in record.results.items():
        assert_same(name, found[name], recorded, bit_equal=bit_equal)


def test_this_release_continues_the_runs_of_a_compatible_newer_release(tmp_path: Path, monkeypatch) -> None:
    data_dir, record = read_golden(FILES[-1], tmp_path)
    with monkeypatch.context() as patched:
        use_next_release(patched)
        Store.open(data_dir, role="api").close()
    with serve(data_dir) as url, closing(GoldenClient(url, record.keys["ann"])) as client:
        found = continue_run(client, record, data_dir)
    for name, recorded in record.results.items():
        assert_same(name, found[name], recorded, bit_equal=record.arithmetic == hash_arithmetic())


@pytest.mark.parametrize("file", OUTDATED, ids=lambda file: file.name.removesuffix(".tar.xz"))
def test_commands_leave_the_database_of_an_earlier_release_alone(file: Path, tmp_path: Path, capsys) -> None:
    data_dir, _ = read_golden(file, tmp_path)
    before = read_database(data_dir / "skyrl_tx.db")
    here = ("--data-dir", str(data_dir))
    for command in (["status"], ["keys", "list"], ["keys", "create", "eve"], ["runs", "list"], ["usage"], ["audit"]):
        assert main([*command, *here]) == 1
        assert "of an older release: run the release that wrote it, or start the server" in capsys.readouterr().err

    # A backup has the earlier schema and all weights.
    assert main(["backup", str(tmp_path / "backup"), *here]) == 0
    assert main(["restore", str(tmp_path / "backup"), "--data-dir", str(tmp_path / "restored")]) == 0
    assert read_database(data_dir / "skyrl_tx.db") == before == read_database(tmp_path / "restored" / "skyrl_tx.db")
    weights = [LocalArtifacts(folder / "artifacts").list_ids() for folder in (data_dir, tmp_path / "restored")]
    assert weights[0] == weights[1] != []


def read_database(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def assert_decodable(data_dir: Path) -> None:
    """Assert that this release reads every stored request and result."""
    with closing(sqlite3.connect(data_dir / "skyrl_tx.db")) as connection:
        rows = connection.execute("SELECT kind, body, result FROM requests").fetchall()
    assert rows
    for kind, body, result in rows:
        request = codec.decode(body)
        assert not isinstance(request, requests.ModelSpec) and codec.get_kind(request) == kind
        assert result is None or isinstance(codec.decode(result), results.Result)


def check_keys(url: str, record: Record) -> None:
    """Assert that the keys have the same owners as before."""
    path = f"{url}/api/v1/training_runs/{record.replayed_model_id}"
    expected = {"ann": HTTPStatus.OK, "bob": HTTPStatus.NOT_FOUND}
    for owner, key in record.keys.items():
        assert httpx.get(path, headers={"X-API-Key": key}).status_code == expected[owner], owner
    if record.keys:
        assert httpx.get(path, headers={"X-API-Key": "tml-other"}).status_code == HTTPStatus.UNAUTHORIZED
