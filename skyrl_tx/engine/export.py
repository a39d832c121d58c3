"""What external weights are beside a snapshot's own files: named for whoever loads them, and encrypted on demand."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from skyrl_tx import age
from skyrl_tx.contract.backend import Snapshot

_CONFIG_FILE = "adapter_config.json"


def write_export(snapshot: Snapshot, directory: Path, base_model: str, age_recipients: Collection[str]) -> None:
    """Write a snapshot for others to load, saying that it belongs on `base_model`.

    A backend notes where this machine has its base weights, which says nothing elsewhere.
    """
    snapshot.write(directory)
    path = directory / _CONFIG_FILE
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    config["base_model_name_or_path"] = base_model
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    if age_recipients:
        age.encrypt_files(directory, age_recipients)
