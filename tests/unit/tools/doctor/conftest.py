"""The subject of the doctor's checks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_tx.tools.doctor.findings import ExaminedServer
from skyrl_tx.tools.serve import read_settings


@pytest.fixture
def subject(tmp_path: Path) -> Callable[..., ExaminedServer]:
    """Return a function that creates a subject from flags of `serve`."""

    def make(*flags: str | Path, pids: dict[str, int] | None = None) -> ExaminedServer:
        given = ["--data-dir", str(tmp_path / "data"), "--port", "0", *map(str, flags)]
        return ExaminedServer(read_settings("doctor", given, {"base_model": ""}), pids or {})

    return make
