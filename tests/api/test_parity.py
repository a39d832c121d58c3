"""Every endpoint that the SDK calls succeeds for a valid request."""

import ast
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import tinker

from docs.sdk_endpoints import SDK_ENDPOINTS, SdkEndpoint
from skyrl_tx.store import keys
from tests.api.test_custom_loss_routes import NODES
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack

METHODS = {"get", "post", "put", "delete", "patch", "get_api_list"}
DATA = [
    {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}},
    }
]
PASS = {"data": DATA, "loss_fn": "cross_entropy"}
SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "num_samples": 1,
    "sampling_params": {"max_tokens": 2, "seed": 1},
}


class Client:
    """A client that fills in the ids of one session and its run, and waits for each result."""

    def __init__(self, stack: LiveStack, key: str = "tml-local") -> None:
        self.http = httpx.Client(base_url=f"{stack.url}/api/v1", headers={"X-API-Key": key}, timeout=60)
        made = self.http.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})
        self.session = made.json()["session_id"]
        self.num_training, self.last_future, self.samples = 0, "", 0
        self.run = self.future("/create_model", **self.first_model, base_model=PUBLIC_NAME, lora_config={"rank": 4})
        for kind, path in (("weights", "/save_weights"), ("external_weights", "/save_weights_external")):
            self.future(path, **self.next(), path=kind)
        self.kept = f"tinker://{self.run}/weights/weights"
        made = self.json("POST", "/create_sampling_session", **self.sampling(0))
        self.sampler = made["sampling_session_id"]

    @property
    def first_model(self) -> dict[str, object]:
        """The fields that identify the first model of the session."""
        return {"session_id": self.session, "model_seq_id": 0}

    def sampling(self, number: int) -> dict[str, object]:
        return {"session_id": self.session, "sampling_session_seq_id": number, "base_model": PUBLIC_NAME}

    def next(self) -> dict[str, object]:
        """Return the fields that identify the next request of the run."""
        self.num_training += 1
        return {"model_id": self.run, "seq_id": self.num_training}

    def sample(self) -> dict[str, object]:
        self.samples += 1
        return {**SAMPLE, "sampling_session_id": self.sampler, "seq_id": self.samples}

    def call(self, method: str, path: str, /, **body: object) -> httpx.Response:
        """Call an endpoint and assert success. A GET request sends its fields in the query."""
        given = {"params": body} if method == "GET" else {"json": body} if body else {}
        # The SDK sends a key with each call, so that a repeated call has no second effect.
        headers = {"X-Idempotency-Key": f"{self.session}{path}"}
        answer = self.http.request(method, path.lstrip("/"), headers=headers, **given)  # type: ignore[arg-type]
        assert answer.status_code in (200, 204, 302), (method, path, answer.status_code, answer.text)
        return answer

    def json(self, method: str, path: str, /, **body: object) -> dict:
        return self.call(method, path, **body).json()

    def result(self, request_id: str) -> dict:
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                assert answer.status_code == 200 and "error" not in answer.json(), answer.text
                return answer.json()

    def future(self, path: str, /, **body: object) -> str:
        """Call an endpoint that returns a future and wait for the result.

        Returns the model id, if there is one.
        """
        made = self.json("POST", path, **body)
        self.last_future = made["request_id"]
        self.result(self.last_future)
        return made.get("model_id") or ""


def try_out(client: Client, endpoint: SdkEndpoint) -> None:
    """Call one endpoint as the SDK would."""
    kind = "external_weights" if "external" in endpoint.path else "weights"
    path = endpoint.path.format(
        run_id=client.run, session_id=client.session, sampler_id=client.sampler, kind=kind, name=kind
    )
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)

    bodies: dict[str, dict[str, object]] = {
        "POST /client/config": {"sdk_version": "0.38.0"},
        "POST /client/dynamic_config": {"sdk_version": "0.38.0"},
        "POST /create_session": {"tags": [], "sdk_version": "0.38.0"},
        "POST /session_heartbeat": {"session_id": client.session},
        "POST /sessions/{session_id}/finish": {"reason": {"type": "success"}},
        "POST /telemetry": {"events": [], "platform": "linux", "sdk_version": "0.38.0", "session_id": client.session},
        "POST /create_model": {**client.first_model, "base_model": PUBLIC_NAME, "lora_config": {"rank": 4}},
        "POST /get_info": {"model_id": client.run},
        # Sampling and futures.
        "POST /create_sampling_session": client.sampling(1),
        "POST /join_sampling_session": {"sampling_session_id": client.sampler},
        "POST /retrieve_futures": {
            "target": {"type": "sampling_session", "sampling_session_id": client.sampler, "cloned_sampler_id": 0},
            "prev_cursor": 0,
            "timeout": 0.0,
        },
        "POST /retrieve_future": {"request_id": client.last_future},
        "POST /cancel_future": {"request_id": "none"},
        # Checkpoints, projects and usage.
        f"PUT {CHECKPOINT}/ttl": {"ttl_seconds": 7200},
        "POST /weights_info": {"tinker_path": client.kept},
        "POST /copy_weights": {"source_path": client.kept, "destination_project_id": "p"},
        "PUT /sessions/{session_id}/project": {"project_id": "p"},
        "POST /sessions/search": {"owner": {"type": "own"}},
        "GET /audit": {"day": f"{today:%Y-%m-%d}"},
        "GET /billing/usage/events": {
            "starting_on": today.isoformat(),
            "ending_before": (today + timedelta(days=1)).isoformat(),
        },
    }

    futures: dict[str, dict[str, object]] = {
        "/forward_backward": {"forward_backward_input": PASS},
        "/forward": {"forward_input": PASS},
        "/optim_step": {"adam_params": {"learning_rate": 1e-3}},
        "/save_weights": {"path": "a"},
        "/save_weights_for_sampler": {"path": "b"},
        "/save_weights_external": {"path": "c"},
        "/load_weights": {"path": client.kept, "optimizer": True},
        "/unload_model": {},
    }

    if endpoint.path in futures:
        client.future(path, **client.next(), **futures[endpoint.path])
    elif endpoint.path == "/asample":
        client.future(path, **client.sample())
    elif endpoint.path == CUSTOM_LOSS:
        inputs = [{"name": name, "rank": 1} for name in ("logprobs", "advantages")]
        graph = {"format": 1, "nodes": NODES}
        client.future(path, session_id=client.session, custom_loss_seq_id=0, name="gain", inputs=inputs, graph=graph)
    else:
        client.call(endpoint.method, path, **bodies.get(f"{endpoint.method} {endpoint.path}", {}))


CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
CUSTOM_LOSS = "/create_custom_loss"
"""The endpoint that the fake backend does not support."""
REVOKE = SdkEndpoint("DELETE", "/auth/apikey/me", "0.30+", "`tinker auth logout`")
"""The endpoint that needs a key and revokes it."""


@pytest.mark.parametrize(
    ("stack", "endpoint"),
    [
        pytest.param(
            "jax" if endpoint.path == CUSTOM_LOSS else "fake", endpoint, id=f"{endpoint.method} {endpoint.path}"
        )
        for endpoint in SDK_ENDPOINTS
        if endpoint != REVOKE
    ],
    indirect=["stack"],
    scope="package",
)
def test_every_endpoint_of_the_sdk_succeeds(stack: LiveStack, endpoint: SdkEndpoint) -> None:
    client = Client(stack)
    try:
        try_out(client, endpoint)
    finally:
        client.http.close()


def test_the_last_endpoint_of_the_sdk_revokes_a_key(tmp_path: Path) -> None:
    assert REVOKE in SDK_ENDPOINTS
    with live_stack("fake", tmp_path) as stack:
        key, _ = stack.server.store.write(
            lambda tx: keys.create(tx, owner="ann", scope="user", name="", note="", now=time.time())
        )
        client = Client(stack, key)
        try_out(client, REVOKE)
        assert client.http.get("auth/apikey/me").status_code == 401
        client.http.close()


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
