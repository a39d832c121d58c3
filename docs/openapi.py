"""The OpenAPI document of the server, for the reference and the documentation site."""

import tempfile
from pathlib import Path
from typing import Any

from skyrl_tx.compose import APPS
from skyrl_tx.launch.command import load_server_extensions
from skyrl_tx.server.app import create_app
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store.database import Store


def read_openapi() -> dict[str, Any]:
    """Return the document that a server with all apps has at `/openapi.json`."""
    with tempfile.TemporaryDirectory() as directory:
        settings = ApiSettings(data_dir=Path(directory), base_model="tiny")
        store = Store.open(Path(directory), role="api")
        try:
            return create_app(settings, store, load_server_extensions(APPS)).openapi()
        finally:
            store.close()
