"""Backends are found by name."""

import pytest

from skyrl_tx.backends.registry import find_backend
from skyrl_tx.contract.errors import UserError


def test_ours_are_installed():
    assert find_backend("fake").load().__name__ == "FakeBackend"


def test_an_unknown_name_lists_the_installed_ones():
    with pytest.raises(UserError, match=r"backend 'nonesuch' is not installed; installed are: .*fake"):
        find_backend("nonesuch")


def test_a_backend_of_another_distribution_is_found(tmp_path, monkeypatch):
    (tmp_path / "other_backend.py").write_text(
        "from skyrl_tx.testing.fake import BACKEND as FAKE\n"
        "from skyrl_tx.contract.backend import BackendSpec\n"
        "BACKEND = BackendSpec(config=FAKE.config, load=FAKE.load)\n"
        "NONSENSE = 1\n"
    )
    metadata = tmp_path / "other_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-backend\nVersion: 1.0\n")

    (metadata / "entry_points.txt").write_text(
        "[skyrl_tx.backends]\nother = other_backend:BACKEND\nbroken = other_backend:NONSENSE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    assert find_backend("other").config is find_backend("fake").config
    with pytest.raises(UserError, match="'other_backend:NONSENSE' must refer to a BackendSpec, not"):
        find_backend("broken")
