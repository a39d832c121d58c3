"""A browser that fails a test for any message in its console, and any request to another host."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import client_environments

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))


# Module scope, because asyncio cannot start an event loop in this thread while playwright runs.
@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        assert not client_environments.is_required(), f"there is no {CHROMIUM}"
        pytest.skip(f"there is no {CHROMIUM}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory for screenshots: `CONSOLE_SCREENSHOTS`, or a temporary directory."""
    named = os.environ.get("CONSOLE_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
