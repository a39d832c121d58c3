import stat
from pathlib import Path

import pytest

from skyrl_tx.server.identity.authentication import SigningKey


def test_key_file_is_persistent_and_private(tmp_path: Path) -> None:
    key = SigningKey.from_data_dir(tmp_path)
    assert SigningKey.from_data_dir(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "signing.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["signing.key"]
    (tmp_path / "other").mkdir()
    assert SigningKey.from_data_dir(tmp_path / "other") != key


def test_signature_covers_the_parts_in_order(tmp_path: Path) -> None:
    key = SigningKey.from_data_dir(tmp_path)
    signature = key.sign("download", "a", "b")
    assert key.verify(signature, "download", "a", "b")
    for parts in (("download", "b", "a"), ("download", "ab", ""), ("download", "ab"), ("other", "a", "b")):
        assert not key.verify(signature, *parts)
    assert not key.verify("é", "download", "a", "b")


def test_damaged_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "signing.key").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"signing\.key holds 5 bytes"):
        SigningKey.from_data_dir(tmp_path)
