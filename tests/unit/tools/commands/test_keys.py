"""`skyrl-tx keys`, and the owner of an import."""

import errno
import json
import stat
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from skyrl_tx.launch.command import CommandError
from skyrl_tx.store import keys
from skyrl_tx.store.database import Store
from skyrl_tx.tools.cli import main
from skyrl_tx.tools.commands import adapters
from tests.support import old_schemas


def run(data_dir: Path, *arguments: str) -> int:
    return main(["keys", *arguments, "--data-dir", str(data_dir)])


def test_create_list_and_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "new", "create", "ann@example.org", "--admin", "--name", "laptop", "--note", "for tests") == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("tml-")
    assert run(tmp_path / "new", "list", "--json") == 0
    shown = capsys.readouterr().out
    (listed,) = json.loads(shown)
    assert key not in shown and listed["key"] == f"{key[:8]}…"
    assert (listed["owner"], listed["scope"], listed["name"]) == ("ann@example.org", "admin", "laptop")
    assert (listed["note"], listed["revoked"]) == ("for tests", None)
    assert run(tmp_path / "new", "revoke", str(listed["id"])) == 0
    assert "there is no valid admin key now" in capsys.readouterr().out
    assert run(tmp_path / "new", "revoke", str(listed["id"])) == 1
    assert "is already revoked" in capsys.readouterr().err


def test_the_first_key_is_written_once_to_a_file(tmp_path: Path, capsys, monkeypatch) -> None:
    create = ("create", "root", "--admin", "--if-none", "--output", str(tmp_path / "first-key"))

    # A failed write of the file leaves no key, so that the next start tries again.
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        assert run(tmp_path / "data", *create) == 1
    assert list_keys(tmp_path / "data", capsys) == []

    assert run(tmp_path / "data", *create) == 0
    key = (tmp_path / "first-key").read_text().strip()
    assert key.startswith("tml-") and stat.S_IMODE((tmp_path / "first-key").stat().st_mode) == 0o600
    assert run(tmp_path / "data", *create) == 0 and run(tmp_path / "data", "revoke", "1") == 0
    assert run(tmp_path / "data", *create) == 0, "also after its revocation"
    assert (tmp_path / "first-key").read_text().strip() == key
    assert key not in "".join(capsys.readouterr()) and len(list_keys(tmp_path / "data", capsys)) == 1


def test_a_database_of_an_older_release_gets_no_first_key(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'skyrl_tx.db'}")
    with engine.begin() as connection:
        old_schemas.create(connection, "0017")
    engine.dispose()
    assert run(tmp_path, "create", "root", "--if-none", "--output", str(tmp_path / "first-key")) == 0
    assert not (tmp_path / "first-key").exists()
    assert run(tmp_path, "create", "root") == 1


def list_keys(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str | None]]:
    capsys.readouterr()
    assert run(data_dir, "list", "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_scope_and_expiry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "create", "ann", "--scope", "sample", "--expires-in", "30d") == 0
    assert ", scope sample, expires at 20" in capsys.readouterr().err
    assert run(tmp_path, "create", "bob", "--expires-in", "0.000001") == 0
    ann, bob = list_keys(tmp_path, capsys)
    assert (ann["scope"], ann["status"], ann["last_used"]) == ("sample", "valid", None) and ann["expires"] is not None
    assert (bob["scope"], bob["status"]) == ("user", "expired")
    for wrong in (("--expires-in", "1y"), ("--scope", "all"), ("--scope", "read", "--admin")):
        with pytest.raises(SystemExit):
            run(tmp_path, "create", "eve", *wrong)


def test_rotation_prints_a_new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "create", "ann", "--scope", "read", "--name", "laptop") == 0
    assert run(tmp_path, "rotate", "1", "--overlap", "2h") == 0
    out, err = capsys.readouterr()
    assert len(set(out.split())) == 2 and "key 2 of ann, scope read" in err and "key 1 expires at 20" in err
    old, new = list_keys(tmp_path, capsys)
    assert (new["owner"], new["scope"], new["name"], new["expires"]) == ("ann", "read", "laptop", None)
    assert old["expires"] is not None and old["status"] == "valid"
    assert run(tmp_path, "revoke", "1") == 0 and run(tmp_path, "rotate", "1") == 1
    assert "key 1 is unknown, revoked or expired" in capsys.readouterr().err


def test_create_while_a_server_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(tmp_path, role="api")
    try:
        assert run(tmp_path, "create", "ann") == 0
        key = capsys.readouterr().out.strip()
        row = store.read(lambda tx: keys.find(tx, key))
        assert row is not None and (row.owner, row.scope, row.name) == ("ann", "user", "ann")
        assert key.encode() not in b"".join(file.read_bytes() for file in tmp_path.glob("skyrl_tx.db*"))
    finally:
        store.close()


def test_only_the_first_key_is_created_with_if_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "create", "--scope", "metrics", "prometheus") == 0
    capsys.readouterr()
    assert run(tmp_path, "create", "root", "--admin", "--if-none") == 0
    assert capsys.readouterr().out.startswith("tml-")
    for _ in ("a second start", "after the key was revoked"):
        assert run(tmp_path, "create", "root", "--admin", "--if-none") == 0
        out, err = capsys.readouterr()
        assert out == "" and "no key created" in err and "scope admin" in err
        run(tmp_path, "revoke", "2")
        capsys.readouterr()
    assert len(list_keys(tmp_path, capsys)) == 2


def test_a_key_without_a_lifetime_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "create", "root", "--expires-in", "0")
    assert "--expires-in: must be more than 0 s" in capsys.readouterr().err


def test_no_key_is_created_without_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "create", "root", "--output", str(tmp_path / "missing" / "key")) == 1
    assert "No such file or directory; no key was created" in capsys.readouterr().err
    assert list_keys(tmp_path, capsys) == []


@pytest.mark.parametrize("owner", ["local", "", "-x", "a b", "a/b", "a" * 65])
def test_an_invalid_owner_is_refused(tmp_path: Path, owner: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", "--data-dir", str(tmp_path), "--", owner]) == 1
    assert f"owner {owner!r}" in capsys.readouterr().err


def test_a_public_address_requires_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = ["api", "--base-model", "m", "--backend", "fake", "--host", "0.0.0.0", "--port", "0"]
    assert main([*serve, "--data-dir", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "skyrl-tx keys create" in message and "--no-auth" in message


def test_owner_of_an_import(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path, role="tool")) as store:
        assert adapters._choose_owner(store, None) == "local"
        with pytest.raises(CommandError, match=r"--owner 'ann': this server has no API keys"):
            adapters._choose_owner(store, "ann")
        for name, expected in (("ann", "ann"), ("ann", "ann"), ("bob", None)):
            store.write(lambda tx, name=name: keys.create(tx, owner=name, scope="user", name="", note="", now=1.0))
            if expected is not None:
                assert adapters._choose_owner(store, None) == expected
        with pytest.raises(CommandError, match=r"--owner is required.*ann, bob"):
            adapters._choose_owner(store, None)
        assert adapters._choose_owner(store, "bob") == "bob"
        with pytest.raises(CommandError, match=r"--owner 'bod' has no API key.*'ann', 'bob'"):
            adapters._choose_owner(store, "bod")
