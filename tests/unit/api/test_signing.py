import stat
from pathlib import Path

import pytest

from skyrl_tx.api.signing import SigningKey


def test_the_key_outlives_its_process_and_is_private(tmp_path: Path) -> None:
    key = SigningKey.of(tmp_path)
    assert SigningKey.of(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "signing.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["signing.key"]
    (tmp_path / "other").mkdir()
    assert SigningKey.of(tmp_path / "other") != key


def test_a_signature_is_for_these_parts_in_this_order(tmp_path: Path) -> None:
    key = SigningKey.of(tmp_path)
    signature = key.sign("download", "a", "b")
    assert key.proves(signature, "download", "a", "b")
    for parts in (("download", "b", "a"), ("download", "ab", ""), ("download", "ab"), ("other", "a", "b")):
        assert not key.proves(signature, *parts)
    assert not key.proves("é", "download", "a", "b")


def test_a_damaged_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "signing.key").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"signing\.key holds 5 bytes"):
        SigningKey.of(tmp_path)
