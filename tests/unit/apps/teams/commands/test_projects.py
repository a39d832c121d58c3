"""`skyrl-tx projects`: list, set and remove."""

import json
from pathlib import Path

import pytest

from skyrl_tx.store import audit, projects, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.tools.cli import main


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    store = Store.open(tmp_path, role="tool")
    store.write(lambda tx: sessions.create(tx, owner="ann", now=1.0, project_id="math"))
    store.close()
    return tmp_path


def run(data_dir: Path, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["projects", *arguments, "--data-dir", str(data_dir)]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_set_list_and_remove(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data_dir, capsys, "set", "math", "vera", "viewer") == "vera is viewer of math\n"

    run(data_dir, capsys, "set", "math", "vera", "editor")
    run(data_dir, capsys, "set", "new", "bob", "viewer")
    rows = [line.split(maxsplit=3) for line in run(data_dir, capsys, "list").splitlines()]
    assert rows == [
        ["PROJECT", "SESSIONS", "RUNS", "MEMBERS"],
        ["math", "1", "0", "vera (editor)"],
        ["new", "0", "0", "bob (viewer)"],
    ]
    assert json.loads(run(data_dir, capsys, "list", "--json"))[0] == {
        "project": "math",
        "sessions": 1,
        "runs": 0,
        "members": {"vera": "editor"},
    }
    assert run(data_dir, capsys, "remove", "math", "vera") == "removed vera from math\n"
    assert "vera is not a member of math" in run(data_dir, capsys, "remove", "math", "vera", status=1)

    store = Store.open(data_dir, role="tool")
    entries, left = store.read(audit.list_entries), store.read(projects.list_members)
    store.close()
    assert [(row.owner, row.project_id) for row in left] == [("bob", "new")]
    assert [(row.event, row.details.get("role"), row.details.get("before")) for row in entries] == [
        ("project_member_set", "viewer", None),
        ("project_member_set", "editor", "viewer"),
        ("project_member_set", "viewer", None),
        ("project_member_removed", None, "editor"),
    ]


def test_names_that_are_not_possible_are_refused(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "project 'a\\nb': must have 1 to 200 printable" in run(
        data_dir, capsys, "set", "a\nb", "v", "viewer", status=1
    )
    assert "owner ''" in run(data_dir, capsys, "set", "math", "", "viewer", status=1)
