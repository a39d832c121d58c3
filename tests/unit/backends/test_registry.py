"""Backends are found by name."""

import pytest

from skyrl_tx.backends.registry import find_backend
from skyrl_tx.contract.errors import UserError
from skyrl_tx.tools.cli import main
from skyrl_tx.tools.serve import read_settings


def test_ours_are_installed():
    assert find_backend("fake").load().__name__ == "FakeBackend"


def test_an_unknown_name_lists_the_installed_ones():
    with pytest.raises(UserError, match=r"backend 'nonesuch' is not installed; installed are: .*fake"):
        find_backend("nonesuch")


OTHER_ENTRY_POINTS = """
[skyrl_tx.backends]
other = other_backend:BACKEND
number = other_backend:NONSENSE
class = other_backend:Config
missing = other_backend:MISSING
failing = other_backend.failing:BACKEND

[skyrl_tx.launchers]
failing = other_backend.failing:LAUNCHER
"""


@pytest.fixture
def other_distribution(tmp_path, monkeypatch):
    """Installs the package other-backend, which has entry points that cannot be loaded."""
    package = tmp_path / "other_backend"
    package.mkdir()
    (package / "failing.py").write_text("import numpyy\n")
    (package / "__init__.py").write_text(
        "from skyrl_tx.testing.fake import BACKEND as FAKE\n"
        "from skyrl_tx.contract.backend import BackendSpec\n"
        "BACKEND = BackendSpec(config=FAKE.config, load=FAKE.load)\n"
        "NONSENSE = 1\n"
        "Config = FAKE.config\n"
    )

    metadata = tmp_path / "other_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(OTHER_ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


BROKEN = {
    "number": "'other_backend:NONSENSE' of package other-backend 1.0 must refer to a BackendSpec, not to an object of "
    "type int",
    "class": "'other_backend:Config' of package other-backend 1.0 must refer to a BackendSpec, not to the class "
    "FakeConfig",
    "missing": "'other_backend:MISSING' of package other-backend 1.0 cannot be loaded: AttributeError: module "
    "'other_backend' has no attribute 'MISSING'",
    "failing": "'other_backend.failing:BACKEND' of package other-backend 1.0 cannot be loaded: ModuleNotFoundError: No "
    "module named 'numpyy'",
}


@pytest.mark.usefixtures("other_distribution")
def test_a_backend_of_another_distribution_is_found():
    assert find_backend("other").config is find_backend("fake").config
    for name, reason in BROKEN.items():
        with pytest.raises(UserError) as error:
            find_backend(name)
        assert str(error.value) == f"backend {name!r}: entry point {reason}"


@pytest.mark.usefixtures("other_distribution")
def test_broken_entry_points_do_not_stop_a_server_that_does_not_use_them(capsys):
    settings = read_settings("serve", ["--base-model", "m", "--backend", "other"])
    assert settings.backend == "other"
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == len(BROKEN) + 1 and all("skyrl-tx serve: warning: " in line for line in warnings)
    assert "launcher 'failing': entry point 'other_backend.failing:LAUNCHER' of package" in warnings[-1]

    assert main(["serve", "m", "--backend", "failing"]) == 2
    assert capsys.readouterr().err == (
        f"skyrl-tx serve: --backend: backend 'failing': entry point {BROKEN['failing']}\n"
    )
