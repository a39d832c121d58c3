"""`skyrl-tx usage` as a table, JSON and CSV, with prices from the server's file."""

import csv
import json
import time
from pathlib import Path

import pytest

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.store import sessions
from skyrl_tx.store.database import Store
from skyrl_tx.tools.cli import main


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    now = time.time()

    def fill(tx) -> None:
        for owner, tokens, age_s in (("ann", 2_000_000, 0), ("bob", 500, 0), ("ann", 40, 3 * 86_400)):
            session_id = sessions.create(tx, owner=owner, now=now)
            work = (Work(kind="training", tokens=tokens, device_s=0.25),)
            usage.add(tx, owner, session_id, "m", now - age_s, work)

    store = Store.open(tmp_path, role="tool")
    store.write(fill)
    store.close()
    return tmp_path


def run(data_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> str:
    assert main(["usage", "--data-dir", str(data_dir), *flags]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_table(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = (line.split() for line in run(data_dir, capsys, "--since", "1d").splitlines())
    assert header[:3] == ["OWNER", "TRAINING", "TOKENS"]
    assert [row[:2] for row in rows] == [["ann", "2000000"], ["bob", "500"]]


def test_json_with_prices(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = data_dir / "config.yaml"
    config.write_text("base_model: x\nprices:\n  training: 1.5\n")
    ann, _ = json.loads(run(data_dir, capsys, "--json", "--config", str(config)))
    assert ann["training_tokens"] == 2_000_040 and ann["cost_usd"] == pytest.approx(3.0, abs=1e-3)


def test_a_table_without_prices_says_how_to_see_costs(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["usage", "--data-dir", str(data_dir)])
    assert "--config needs the server's YAML file" in capsys.readouterr().err
    config = data_dir / "config.yaml"
    for text in ("", "port: 80\nsettings_of_a_plugin: {a: 1}\n", "prices:\n"):
        config.write_text(text)
        main(["usage", "--data-dir", str(data_dir), "--config", str(config)])
        assert capsys.readouterr().err == f"without costs: --config {config} has no `prices`\n"
    config.write_text("prices: {storage: 0}")
    main(["usage", "--data-dir", str(data_dir), "--config", str(config)])
    main(["usage", "--data-dir", str(data_dir), "--json"])
    main(["usage", "--data-dir", str(data_dir), "--owner", "eve"])
    assert capsys.readouterr().err == ""


def test_csv(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(run(data_dir, capsys, "--csv", "--by", "day").splitlines()))
    assert [row["training_tokens"] for row in rows] == ["40", "2000500"]
    assert set(rows[0]) >= {"day", "device_s", "gigabyte_hours", "cost_usd"}


def test_only_one_owner_and_none(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["owner"] for row in json.loads(run(data_dir, capsys, "--json", "--owner", "bob"))] == ["bob"]
    assert run(data_dir, capsys, "--owner", "eve") == "no usage\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prices: {training: -1}", "prices.training: Input should be greater than or equal to 0"),
        ("prices: {gold: 1}", "config.yaml: there is no setting 'prices.gold'\n"),
        ("prices: {sample: 1}", "config.yaml: there is no setting 'prices.sample'; did you mean sampled?\n"),
        ("prises: {training: 1}", "config.yaml: there is no setting 'prises'; did you mean prices?\n"),
        ("prices: 5", "prices: Input should be a valid dictionary"),
        ("prices: [1", "not YAML"),
    ],
)
def test_wrong_prices_are_named(data_dir: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str) -> None:
    config = data_dir / "config.yaml"
    config.write_text(text)
    assert problem in run(data_dir, capsys, "--config", str(config), status=1)
