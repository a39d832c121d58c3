"""The command lines of SDKs up to 0.35 download training and sampler checkpoints as archives."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.client_environments import SDKS
from tests.support.live_stack import live_stack

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("version", ["0.16.1", "0.22.7", "0.30.4"])
def test_old_sdk_downloads_an_archive(version: str, tmp_path: Path, client_environment) -> None:
    with live_stack("fake", tmp_path) as stack:
        model_id = stack.server.model()
        for number, endpoint in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
            stack.server.result(stack.server.post(endpoint, model_id=model_id, path="final", seq_id=number))
        variables = {
            "TINKER_API_KEY": "tml-local",
            "TINKER_BASE_URL": stack.url,
            "TINKER_TELEMETRY": "0",
            "HOME": str(tmp_path),
        }

        environment = replace(client_environment(SDKS[version]), variables=variables)
        for kind in ("weights", "sampler_weights"):
            out = tmp_path / kind
            path = f"tinker://{model_id}/{kind}/final"
            script = Path(__file__).parent / "archive.py"
            environment.run(script, "checkpoint", "download", path, "--output", out, timeout_s=120.0)
            (folder,) = out.iterdir()
            names = {file.name for file in folder.iterdir()}
            assert names == {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}
            assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
