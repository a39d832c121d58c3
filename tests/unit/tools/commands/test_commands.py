"""Commands on a data directory, with and without a running server."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, CheckpointPath, ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store import checkpoints, models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.tools.cli import main
from tests.support.denied import deny_directory
from tests.support.live_engine import live_engine


def add_run(store: Store, data_dir: Path, name: str, *, status: str = "ready") -> ModelId:
    """Store a run with a training checkpoint."""
    artifact = LocalArtifacts(data_dir / "artifacts").create(
        lambda folder: (folder / "a.json").write_text("{}") and None
    )

    def work(tx) -> ModelId:
        session_id = sessions.create(tx, owner="local", now=time.time())
        run = ModelId(f"{session_id}:train:0")
        spec = codec.encode(ModelSpec(lora=LoraSpec(rank=4, seed=1)))
        model = ModelRow(
            model_id=run,
            session_id=session_id,
            base_model="fake",
            spec=spec,
            status=status,  # type: ignore[arg-type]
            created_at=time.time(),
            last_request_at=time.time(),
        )
        models.create(tx, model)
        row = CheckpointRow(
            model_id=run,
            kind=CheckpointKind.TRAINING,
            name=name,
            artifact_id=artifact.artifact_id,
            created_at=time.time(),
            size_bytes=2,
        )
        checkpoints.put(tx, row, overwrite=False)
        return run

    return store.write(work)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def runs(data_dir: Path) -> list[ModelId]:
    """Store two runs in the data directory of a stopped server."""
    store = Store.open(data_dir, role="api")
    made = [add_run(store, data_dir, "a"), add_run(store, data_dir, "b")]
    store.close()
    return made


def skyrl_tx(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("command", ["status", "keys list", "runs list", "backup /tmp/backup", "usage", "audit"])
def test_a_command_names_the_owner_of_a_data_directory_that_it_may_not_enter(command: str, capsys) -> None:
    with deny_directory("skyrl_tx.db") as (data_dir, reason):
        assert main([*command.split(), "--data-dir", str(data_dir)]) == 1
    name = command.split()[0]
    assert capsys.readouterr().err == f"skyrl-tx {name}: --data-dir {data_dir}: {reason}\n"


@pytest.mark.parametrize("command", ["serve --base-model tiny", "serve --base-model x --backend fake --port 0"])
def test_a_server_names_the_owner_of_a_data_directory_that_it_may_not_enter(command: str, capsys) -> None:
    with deny_directory("skyrl_tx.db") as (data_dir, reason):
        assert main([*command.split(), "--data-dir", str(data_dir)]) == 1
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("skyrl-tx serve: ") and f"{data_dir}" in shown and reason in shown


def test_list_runs_as_table_and_json(data_dir, runs, capsys) -> None:
    status, out, _ = skyrl_tx(capsys, "runs", "list", "--data-dir", data_dir)
    assert status == 0
    head, *rows = out.splitlines()
    assert head.split()[:3] == ["RUN", "NAME", "BASE"] and {row.split()[0] for row in rows} == set(runs)
    _, out, _ = skyrl_tx(capsys, "runs", "list", "--json", "--data-dir", data_dir)
    shown = {record["run"]: record for record in json.loads(out)}
    assert shown[runs[0]]["rank"] == 4 and shown[runs[0]]["checkpoints"] == 1 and shown[runs[0]]["bytes"] == 2
    _, out, _ = skyrl_tx(capsys, "runs", "list", "--owner", "unknown", "--data-dir", data_dir)
    assert out == "no runs\n"


def test_delete_run_with_its_checkpoints(data_dir, runs, capsys) -> None:
    status, out, _ = skyrl_tx(capsys, "runs", "delete", runs[0], "--yes", "--data-dir", data_dir)
    assert status == 0 and f"deleted {runs[0]}" in out
    _, out, _ = skyrl_tx(capsys, "checkpoints", "list", "--json", "--data-dir", data_dir)
    assert [record["path"] for record in json.loads(out)] == [f"tinker://{runs[1]}/weights/b"]
    status, _, err = skyrl_tx(capsys, "runs", "delete", runs[0], "--yes", "--data-dir", data_dir)
    assert status == 1 and "there is no such run" in err


def test_delete_requires_confirmation(data_dir, runs, capsys, monkeypatch) -> None:
    for answer, status in (("n", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert skyrl_tx(capsys, "runs", "delete", runs[0], "--data-dir", data_dir)[0] == status


def test_delete_unloads_a_run_of_a_running_server(data_dir, capsys) -> None:
    """The engine has the run in memory, unloads it and keeps serving other runs."""
    settings = EngineSettings(data_dir=data_dir, base_model="fake")
    api = Store.open(data_dir, role="api")
    runs = [add_run(api, data_dir, name) for name in "ab"]
    backend = FakeBackend("fake", FakeConfig())
    try:
        with live_engine(settings, backend):
            status, out, err = skyrl_tx(capsys, "runs", "delete", runs[0], "--now", "--yes", "--data-dir", data_dir)
            assert status == 0, err
            assert "the running server removes the unused files" in out
        left = api.read(lambda tx: [models.get(tx, run) for run in runs])
        assert left[0] is None and left[1] is not None and left[1].status == "ready"
    finally:
        api.close()


def test_checkpoint_expiry_and_deletion(data_dir, runs, capsys) -> None:
    path = f"tinker://{runs[0]}/weights/a"
    status, out, _ = skyrl_tx(capsys, "checkpoints", "keep", path, "--for", "3600", "--data-dir", data_dir)
    assert status == 0 and "expires at" in out
    listing = ("checkpoints", "list", "--run", runs[0], "--kind", "weights", "--json", "--data-dir", data_dir)
    (record,) = json.loads(skyrl_tx(capsys, *listing)[1])
    assert record["expires"] is not None
    assert "never expires" in skyrl_tx(capsys, "checkpoints", "keep", path, "--data-dir", data_dir)[1]
    for seconds in ("0", "100000000000000"):  # outside the range of datetime
        status, _, err = skyrl_tx(capsys, "checkpoints", "keep", path, "--for", seconds, "--data-dir", data_dir)
        assert status == 1 and f"--for {float(seconds):g}s must be from 1 to" in err
    assert json.loads(skyrl_tx(capsys, *listing)[1])[0]["expires"] is None
    assert skyrl_tx(capsys, "checkpoints", "delete", path, "--data-dir", data_dir)[0] == 0
    assert json.loads(skyrl_tx(capsys, *listing)[1]) == []
    status, _, err = skyrl_tx(capsys, "checkpoints", "delete", path, "--data-dir", data_dir)
    assert status == 1 and "there is no such checkpoint" in err


def list_names(capsys, data_dir: Path, what: str, *flags: str) -> set[str]:
    records = json.loads(skyrl_tx(capsys, what, "list", "--json", *flags, "--data-dir", data_dir)[1])
    return {record["run" if what == "runs" else "path"] for record in records}


def test_deleted_checkpoint_is_restored_unless_deleted_now(data_dir, runs, capsys) -> None:
    a, b = (f"tinker://{run}/weights/{name}" for run, name in zip(runs, "ab", strict=True))
    status, out, _ = skyrl_tx(capsys, "checkpoints", "delete", a, b, "--data-dir", data_dir)
    assert status == 0 and "restore with `skyrl-tx checkpoints undelete`" in out
    assert list_names(capsys, data_dir, "checkpoints") == set()
    assert list_names(capsys, data_dir, "checkpoints", "--deleted") == {a, b}
    assert skyrl_tx(capsys, "checkpoints", "undelete", a, "--data-dir", data_dir)[1] == f"restored {a}\n"
    assert list_names(capsys, data_dir, "checkpoints") == {a}
    for path in (a, b):  # one is not deleted, the other already is
        status, out, _ = skyrl_tx(capsys, "checkpoints", "delete", path, "--now", "--data-dir", data_dir)
        assert status == 0 and "unused artifacts" in out
    status, _, err = skyrl_tx(capsys, "checkpoints", "undelete", a, "--data-dir", data_dir)
    assert status == 1 and "there is no such deleted checkpoint" in err
    status, _, err = skyrl_tx(capsys, "checkpoints", "delete", a, "--now", "--data-dir", data_dir)
    assert status == 1 and "there is no such checkpoint" in err


def test_deleted_run_is_restored_with_its_checkpoints(data_dir, runs, capsys) -> None:
    path = f"tinker://{runs[0]}/weights/a"
    status, out, _ = skyrl_tx(capsys, "runs", "delete", runs[0], "--yes", "--data-dir", data_dir)
    assert status == 0 and "restore with `skyrl-tx runs undelete`" in out
    assert list_names(capsys, data_dir, "runs") == {runs[1]} and list_names(capsys, data_dir, "runs", "--deleted") == {
        runs[0]
    }
    status, _, err = skyrl_tx(capsys, "checkpoints", "undelete", path, "--data-dir", data_dir)
    assert status == 1 and f"its run is deleted; `skyrl-tx runs undelete {runs[0]}` restores both" in err
    assert skyrl_tx(capsys, "runs", "undelete", runs[0], "--data-dir", data_dir)[1] == f"restored {runs[0]}\n"
    assert path in list_names(capsys, data_dir, "checkpoints") and list_names(capsys, data_dir, "runs") == set(runs)
    status, _, err = skyrl_tx(capsys, "runs", "undelete", runs[0], "--data-dir", data_dir)
    assert status == 1 and "there is no such deleted run" in err
    assert skyrl_tx(capsys, "runs", "delete", runs[0], "--yes", "--data-dir", data_dir)[0] == 0
    assert skyrl_tx(capsys, "runs", "delete", runs[0], "--now", "--yes", "--data-dir", data_dir)[0] == 0
    assert list_names(capsys, data_dir, "runs", "--deleted") == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs", "list"), "no server has stored anything there"),
        (("export", "tinker://a/weights/b", "out"), "no server has stored anything there"),
        (("import", "nowhere"), "no such directory"),
    ],
)
def test_error_names_an_empty_data_directory(data_dir, capsys, arguments, message: str) -> None:
    status, _, err = skyrl_tx(capsys, *arguments, "--data-dir", data_dir)
    assert status == 1 and message in err


def test_export_refuses_an_encrypted_checkpoint(data_dir, capsys, tmp_path) -> None:
    store = Store.open(data_dir, role="api")
    run = add_run(store, data_dir, "a")
    artifact = LocalArtifacts(data_dir / "artifacts").create(lambda folder: (folder / "a.json.age").touch())
    row = CheckpointRow(
        model_id=run,
        kind=CheckpointKind.EXTERNAL,
        name="encrypted",
        artifact_id=artifact.artifact_id,
        created_at=time.time(),
        size_bytes=0,
    )
    store.write(lambda tx: checkpoints.put(tx, row, overwrite=False))
    path = CheckpointPath(run, CheckpointKind.EXTERNAL, "encrypted")
    store.close()
    status, _, err = skyrl_tx(capsys, "export", str(path), tmp_path / "out", "--data-dir", data_dir)

    assert status == 1 and "is encrypted" in err


def test_output_into_a_pipe_that_is_closed_is_no_error(tmp_path: Path) -> None:
    """For example, in `skyrl-tx audit | head` the reader ends first."""
    Store.open(tmp_path, role="tool").close()
    command = [sys.executable, "-m", "skyrl_tx", "keys", "list", "--json", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        said = child.stderr.read()
    assert (child.returncode, said) == (128 + signal.SIGPIPE, "")


def test_set_keeps_the_newest_checkpoints_of_a_run(data_dir, runs, capsys) -> None:
    store = Store.open(data_dir, role="api")
    row = CheckpointRow(
        model_id=runs[0],
        kind=CheckpointKind.TRAINING,
        name="newer",
        artifact_id=ArtifactId("art-" + "0" * 32),
        created_at=time.time() + 1,
        size_bytes=2,
    )
    store.write(lambda tx: checkpoints.put(tx, row, overwrite=False))
    status, out, _ = skyrl_tx(capsys, "runs", "set", runs[0], "--keep-last", "1", "--data-dir", data_dir)
    assert (status, out) == (0, f"{runs[0]} keeps the newest 1 checkpoints of each kind; moved 1 to the trash\n")
    left = store.read(lambda tx: checkpoints.list_by_run(tx, runs[0], time.time()))
    assert [found.name for found in left] == ["newer"]
    assert store.read(lambda tx: checkpoints.find_keep_last(tx, runs[0], 5)) == 1

    # `all` ends it. Other values and runs are refused.
    assert skyrl_tx(capsys, "runs", "set", runs[0], "--keep-last", "all", "--data-dir", data_dir)[0] == 0
    assert store.read(lambda tx: checkpoints.find_keep_last(tx, runs[0], 5)) == 0
    store.close()
    status, _, err = skyrl_tx(capsys, "runs", "set", "none", "--keep-last", "1", "--data-dir", data_dir)
    assert status == 1 and "there is no such run" in err
    with pytest.raises(SystemExit):
        main(["runs", "set", runs[0], "--keep-last", "0", "--data-dir", str(data_dir)])
    message = "argument --keep-last: '0' must be a whole number from 1 to 999999999, or all\n"
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "runs set RUN --keep-last=-1",
            "argument --keep-last: '-1' must be a whole number from 1 to 999999999, or all",
        ),
        (
            "runs set RUN --keep-last some",
            "argument --keep-last: 'some' must be a whole number from 1 to 999999999, or",
        ),
        ("keys rotate first", "argument ID: 'first' must be a whole number from 1"),
        ("keys revoke 1 x", "argument ID: 'x' must be a whole number from 1"),
        ("status --watch --times 1.5", "argument --times: '1.5' must be a whole number from 1"),
        ("backup ~no-such-user/b", "argument DIR: '~no-such-user/b': ~no-such-user has no home directory"),
    ],
)
def test_an_invalid_value_says_what_is_allowed(command: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        main(command.split())
    assert exit.value.code == 2 and message in capsys.readouterr().err
