"""The table of endpoints that the SDK calls is complete, and the endpoints that only older releases call succeed.

`test_conformance.py` calls all other endpoints with the installed release.
"""

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinker

from skyrl_tx.store import keys
from skyrl_tx.tools.conformance.traffic import SDK_ENDPOINTS
from tests.support.live_api import Server
from tests.support.live_stack import LiveStack, live_stack

METHODS = {"get", "post", "put", "delete", "patch", "get_api_list"}
PASS = {
    "data": [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}},
        }
    ],
    "loss_fn": "cross_entropy",
}


def train(server: Server, endpoint: str, /, **body: Any) -> dict[str, Any]:
    """Send a request of a new run and return its result."""
    result = server.result(server.post(endpoint, model_id=server.model(), seq_id=1, **body))
    assert "error" not in result, result
    return result


def test_forward_of_old_releases(stack: LiveStack) -> None:
    assert train(stack.server, "forward", forward_input=PASS)["metrics"]["num_tokens:sum"] == 3


def test_unload_model_of_old_releases(stack: LiveStack) -> None:
    assert train(stack.server, "unload_model")


def test_archive_of_old_releases(stack: LiveStack) -> None:
    run, kind, name = str(train(stack.server, "save_weights", path="a")["path"]).removeprefix("tinker://").split("/")
    url = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    assert stack.server.client.get(url).status_code == 302


def test_key_is_revoked_by_its_owner(tmp_path: Path) -> None:
    with live_stack("fake", tmp_path) as stack:
        key, _ = stack.server.store.write(
            lambda tx: keys.create(tx, owner="ann", scope="user", name="", note="", now=time.time())
        )
        headers, url = {"X-API-Key": key}, "/api/v1/auth/apikey/me"
        assert stack.server.client.get(url, headers=headers).status_code == 200
        assert stack.server.client.delete(url, headers=headers).status_code == 204
        assert stack.server.client.get(url, headers=headers).status_code == 401


def sdk_paths() -> Iterator[tuple[str, str]]:
    """Yield each path that the installed SDK calls, and its file and line.

    Parameter names are removed.
    """
    root = Path(tinker.__file__).parent
    for file in root.rglob("*.py"):
        if file.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            text = ast.unparse(node.args[0]).strip("f'\"")
            if node.func.attr.lstrip("_") in METHODS and text.startswith("/api/v1/"):
                yield re.sub(r"\{.*?\}", "{}", text.removeprefix("/api/v1")), f"{file.relative_to(root)}:{node.lineno}"


def test_the_table_has_every_path_of_the_installed_sdk() -> None:
    # The SDK writes a checkpoint as one parameter, but the path has two segments: kind and name.
    known = {
        re.sub(r"\{.*?\}", "{}", endpoint.path.replace("{kind}/{name}", "{checkpoint}")) for endpoint in SDK_ENDPOINTS
    }
    found = dict(sdk_paths())
    assert len(found) >= 40
    assert {path: place for path, place in found.items() if path not in known} == {}
