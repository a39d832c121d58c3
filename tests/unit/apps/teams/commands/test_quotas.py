"""`skyrl-tx quotas`: list, set and remove."""

import json
import time
from pathlib import Path

import pytest

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.store import audit, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.tools.cli import main


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    def fill(tx) -> None:
        session_id = sessions.create(tx, owner="ann", now=time.time())
        usage.add(tx, "ann", session_id, "m", time.time(), (Work(kind="training", tokens=1_500_000),))

    store = Store.open(tmp_path, role="tool")
    store.write(fill)
    store.close()
    return tmp_path


def run(data_dir: Path, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["quotas", *arguments, "--data-dir", str(data_dir)]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_set_list_and_remove(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data_dir, capsys, "list") == "no quotas\n"

    said = run(data_dir, capsys, "set", "ann", "training_tokens_per_day", "200M")
    assert said == "training_tokens_per_day of ann is 200M\n"

    run(data_dir, capsys, "set", "*", "checkpoint_bytes", "5G")
    run(data_dir, capsys, "set", "ann", "weight", "3")
    rows = [line.split() for line in run(data_dir, capsys, "list").splitlines()]
    assert rows == [
        ["SUBJECT", "LIMIT", "VALUE", "OVER", "USED"],
        ["*", "checkpoint_bytes", "5G", "-", "-"],
        ["ann", "training_tokens_per_day", "200M", "wait", "1.5M"],
        ["ann", "weight", "3", "-", "-"],
    ]

    listed = json.loads(run(data_dir, capsys, "list", "--json"))
    assert listed[1] == {
        "subject": "ann",
        "limit": "training_tokens_per_day",
        "value": 200_000_000,
        "over": "wait",
        "used": 1_500_000,
    }
    assert run(data_dir, capsys, "remove", "ann", "weight") == "removed weight of ann\n"
    assert "ann has no weight" in run(data_dir, capsys, "remove", "ann", "weight", status=1)

    store = Store.open(data_dir, role="tool")
    entries = store.read(audit.list_entries)
    store.close()
    assert [(row.event, row.actor, row.details["subject"]) for row in entries] == [
        ("organization_quota_set", "operator", "ann"),
        ("organization_quota_set", "operator", "*"),
        ("organization_weight_set", "operator", "ann"),
        ("organization_weight_set", "operator", "ann"),
    ]
    assert all(row.details["os_user"] for row in entries)


def test_work_beyond_a_quota_of_a_day_may_fail(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(data_dir, capsys, "set", "ann", "training_tokens_per_day", "1M", "--over", "fail")
    assert said == "training_tokens_per_day of ann is 1M; requests beyond it fail\n"
    assert "fail" in run(data_dir, capsys, "list")
    refused = run(data_dir, capsys, "set", "ann", "models_in_training", "1", "--over", "fail", status=1)
    assert "over 'fail': not possible for models_in_training" in refused
    run(data_dir, capsys, "remove", "ann", "training_tokens_per_day")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("ann", "training_steps", "1"), "limit 'training_steps': unknown; choose one of"),
        (("ann", "samples_at_once", "1"), "limit 'samples_at_once': this limit no longer exists"),
        (("ann", "models_in_training", "many"), "value 'many': must be a whole number"),
        (("key:x", "models_in_training", "1"), "must be key: and the number"),
        (("project:a", "weight", "1"), "only a single owner can have a weight"),
    ],
)
def test_wrong_arguments_are_named(
    data_dir: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in run(data_dir, capsys, "set", *arguments, status=1)
    assert run(data_dir, capsys, "list") == "no quotas\n"


def test_a_key_that_does_not_exist_is_refused_and_an_owner_without_keys_noted(data_dir, capsys) -> None:
    said = run(data_dir, capsys, "set", "key:99", "sample_tokens_per_day", "5", status=1)
    assert "there is no key 99" in said
    run(data_dir, capsys, "set", "key:*", "sample_tokens_per_day", "5")
    main(["quotas", "set", "nosuch", "training_tokens_per_day", "5k", "--data-dir", str(data_dir)])
    assert "note: nosuch has no API key" in capsys.readouterr().err
