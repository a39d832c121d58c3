"""`skyrl-tx audit` as a table and JSON, by actor and by event."""

import json
import time
from pathlib import Path
from typing import get_args

import pytest

from skyrl_tx.apps.teams import commands
from skyrl_tx.store import audit
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.database import Store
from skyrl_tx.tools.cli import main

ANN, BOB = Actor("ann", 3), Actor("bob")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    now = time.time()
    acts: tuple[tuple[audit.Event, Actor, float], ...] = (
        ("checkpoint_delete", BOB, 90 * 86_400),
        ("checkpoint_create", ANN, 300),
        ("checkpoint_create", BOB, 200),
        ("checkpoint_delete", BOB, 100),
    )

    def fill(tx) -> None:
        for number, (event, actor, age_s) in enumerate(acts):
            audit.record(tx, event, actor, now - age_s, path=f"tinker://a:train:0/weights/{number}", size_bytes=number)

    store = Store.open(tmp_path, role="tool")
    store.write(fill)
    store.close()
    return tmp_path


def paths(data_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert main(["audit", "--data-dir", str(data_dir), "--json", *flags]) == 0
    return [row["path"][-1] for row in json.loads(capsys.readouterr().out)]


def test_table(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--data-dir", str(data_dir), "--actor", "ann"]) == 0
    header, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["AT", "EVENT", "ACTOR", "KEY", "PATH", "DETAILS"]
    assert row[-4:] == ["ann", "3", "tinker://a:train:0/weights/1", "size_bytes=1"]


def test_entries_of_the_last_days_in_order_by_actor_and_event(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paths(data_dir, capsys) == ["1", "2", "3"]
    assert paths(data_dir, capsys, "--since", "100d") == ["0", "1", "2", "3"]
    assert paths(data_dir, capsys, "--actor", "bob") == ["2", "3"]
    assert paths(data_dir, capsys, "--actor", "bob", "--event", "checkpoint_delete") == ["3"]


def test_an_unknown_event_is_refused_with_the_names_of_all(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["audit", "--data-dir", str(data_dir), "--event", "checkpoint_deleted"])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and "argument --event: invalid choice: 'checkpoint_deleted'" in error
    assert [name for name in get_args(audit.Event) if name not in error] == []


def test_the_newest_entries_of_too_many_are_listed(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_MAX_LISTED", 2)
    assert paths(data_dir, capsys, "--since", "100d") == ["2", "3"]
    assert paths(data_dir, capsys, "--since", "100d", "--actor", "ann") == ["1"]


def test_without_entries(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--data-dir", str(data_dir), "--actor", "eve"]) == 0
    assert capsys.readouterr().out == "no entries\n"
