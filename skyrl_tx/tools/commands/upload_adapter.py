"""`skyrl-tx import --server`: sends a PEFT adapter to a server over HTTP.

The command needs the server's URL and an API key, but no access to its machine.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from safetensors import SafetensorError, safe_open

from skyrl_tx.contract.state_files import CONFIG_FILE, WEIGHTS_FILE
from skyrl_tx.launch.command import CommandError
from skyrl_tx.weights.adapter_config import read_config

KEY_VARIABLE = "TINKER_API_KEY"
_FILES = CONFIG_FILE, WEIGHTS_FILE
_TIMEOUT_S = 900.0
"""The server checks a large adapter for minutes before it responds."""
_MLP_PARTS = (".mlp.", ".experts.", ".gate_proj.", ".up_proj.", ".down_proj.")
_UNEMBED_PARTS = ("lm_head.", "unembed_tokens.", "embed_tokens.")


@contextmanager
def open_source(source: str) -> Generator[Path]:
    """Yield the directory of an adapter. The files of a URL are downloaded for this."""
    if not source.startswith(("http://", "https://")):
        yield Path(source).expanduser().absolute()
        return
    with TemporaryDirectory(prefix="skyrl_tx-") as directory:
        for name in _FILES:
            url = f"{source.rstrip('/')}/{name}"
            try:
                with httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as response:
                    response.raise_for_status()
                    with (Path(directory) / name).open("wb") as file:
                        for piece in response.iter_bytes(2**20):
                            file.write(piece)
            except httpx.HTTPError as error:
                raise CommandError(f"{url}: {error}") from error
        yield Path(directory)


def upload(directory: Path, server: str, base_model: str | None) -> str:
    """Upload an adapter, and return the path of its checkpoint. Raises CommandError or UserError.

    Without `base_model`, the adapter is for the first model that the server lists.
    """
    lora = {"rank": read_config(directory)["r"], **_find_groups(directory / WEIGHTS_FILE)}
    headers = {"X-API-Key": os.environ.get(KEY_VARIABLE, "")}
    with httpx.Client(base_url=f"{server.rstrip('/')}/api/v1/", headers=headers, timeout=_TIMEOUT_S) as client:
        if base_model is None:
            models = _call(client, "GET", "get_server_capabilities")["supported_models"]
            base_model = models[0]["model_name"]
        body = {"base_model": base_model, "lora_config": lora}
        started = _call(client, "POST", "external_weights_upload_start", json=body)

        # Send the files without the API key, because the URLs may lead to another host.
        for name in _FILES:
            size = str((directory / name).stat().st_size)
            with (directory / name).open("rb") as file, httpx.Client(timeout=_TIMEOUT_S) as plain:
                _call(plain, "PUT", started["urls"][name], content=file, headers={"content-length": size})
        finish = {"upload_id": started["upload_id"]}
        return _call(client, "POST", "external_weights_upload_finish", json=finish)["tinker_path"]


def _find_groups(weights: Path) -> dict[str, bool]:
    """Return which groups of modules an adapter changes, by the usual names of modules."""
    try:
        with safe_open(weights, framework="np") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CommandError(f"{weights}: {error}") from error
    mlp = {name for name in names if any(part in name for part in _MLP_PARTS)}
    unembed = {name for name in names if any(part in name for part in _UNEMBED_PARTS)} - mlp
    return {"train_attn": bool(set(names) - mlp - unembed), "train_mlp": bool(mlp), "train_unembed": bool(unembed)}


def _call(client: httpx.Client, method: str, url: str, **arguments: Any) -> dict[str, Any]:
    """Make a call, and return the JSON object of the response. Raises CommandError with the server's reason."""
    try:
        response = client.request(method, url, **arguments)
        content: dict[str, Any] = response.json() if response.content else {}
    except (httpx.HTTPError, ValueError) as error:
        raise CommandError(f"{client.base_url or url}: {error or type(error).__name__}") from error
    if not response.is_success:
        advice = f"; set ${KEY_VARIABLE} to an API key" if response.status_code == HTTPStatus.UNAUTHORIZED else ""
        raise CommandError(f"the server refused the adapter: {content.get('detail', response.status_code)}{advice}")
    return content
