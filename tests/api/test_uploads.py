"""Uploads of external weights by plain HTTP, in the form of the SDK's reference pages."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from skyrl_tx.server.routes.uploads import Uploads
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys
from skyrl_tx.tools.cli import main
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.live_api import Server, adapters_in_process, live_api
from tests.support.live_stack import PUBLIC_NAME, live_stack

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA = {"rank": 2, "train_mlp": False, "train_unembed": False}
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
INPUTS, OUTPUTS = 128, 128
"""The size of `MODULE` in the tiny model."""


def make_config(**changes: object) -> bytes:
    return json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **changes}).encode()


def make_weights(value: float = 1.0, module: str = MODULE, inputs: int = INPUTS, rank: int = 2) -> bytes:
    a, b = np.full((rank, inputs), value, np.float32), np.ones((OUTPUTS, rank), np.float32)
    return save({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("data")
    settings = ApiSettings(port=0, data_dir=data_dir, base_model=str(model), served_model_name=PUBLIC_NAME)
    with adapters_in_process(), live_api(settings) as server:
        yield server


@pytest.fixture
def server(api: Server, request: pytest.FixtureRequest) -> Iterator[Server]:
    """An API that is called with a key of a new owner, and has no unfinished uploads."""
    api.client.headers["X-API-Key"] = create_key(api, request.node.name)
    yield api
    api.client.headers.pop("x-stainless-package-version", None)
    Uploads(api.settings).remove_expired(math.inf)


def create_key(server: Server, owner: str) -> str:
    key, _ = server.store.write(lambda tx: keys.create(tx, owner=owner, scope="user", name=owner, note="", now=1.0))
    return key


def start(server: Server, **changes: object) -> dict[str, Any]:
    body = {"base_model": PUBLIC_NAME, "lora_config": LORA, "destination_project_id": None, **changes}
    answer = server.post("external_weights_upload_start", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def send(url: str, content: bytes | Iterator[bytes]) -> httpx.Response:
    """Send a file as any HTTP client does, without an API key."""
    return httpx.put(url, content=content, timeout=20)


def finish(server: Server, upload_id: str) -> httpx.Response:
    return server.post("external_weights_upload_finish", upload_id=upload_id)


def list_uploads(server: Server) -> list[Path]:
    return list((server.settings.data_dir / "uploads").iterdir())


def test_an_upload_becomes_a_checkpoint(server: Server, request: pytest.FixtureRequest) -> None:
    started = start(server, destination_project_id="p")
    assert started["urls"].keys() == {CONFIG, WEIGHTS} and "expires" in started
    for name, content in ((CONFIG, make_config()), (WEIGHTS, b"sent again"), (WEIGHTS, make_weights())):
        assert send(started["urls"][name], content).status_code == 200
    path = finish(server, started["upload_id"]).json()["tinker_path"]
    assert "/external_weights/" in path and list_uploads(server) == []
    assert finish(server, started["upload_id"]).json() == {"tinker_path": path}, "a retry"

    # The checkpoint belongs to the caller, and computes the same update with alpha 32 as the files do with 4.
    run = server.client.get("/api/v1/training_runs").json()["training_runs"]
    assert [(row["model_owner"], row["lora_rank"], row["base_model"]) for row in run] == [
        (request.node.name, 2, PUBLIC_NAME)
    ]
    assert server.client.get("/api/v1/training_runs?project_id=p").json()["cursor"]["total_count"] == 1
    run_path = path.removeprefix("tinker://").replace("/external_weights", "/checkpoints/external_weights")
    signed = server.client.get(f"/api/v1/training_runs/{run_path}/external_weights_urls").json()
    tensors = load(httpx.get(signed["urls"][WEIGHTS]).content)
    update = tensors[f"{MODULE}.lora_B.weight"] @ tensors[f"{MODULE}.lora_A.weight"] * 32 / 2
    assert update == pytest.approx(np.full((OUTPUTS, INPUTS), 4.0))

    # Clients can train and sample from it.
    session = server.session()
    loaded = server.post("load_weights", session_id=session, model_seq_id=0, path=path)
    assert loaded.status_code == 200 and loaded.json()["model_id"]
    sampler = server.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path)
    assert sampler.status_code == 200


def test_sdk_040_gets_headers_with_each_url(server: Server) -> None:
    server.client.headers["x-stainless-package-version"] = "0.40.0"
    urls = start(server)["urls"]
    assert {tuple(entry) for entry in urls.values()} == {("url", "headers")}
    assert send(urls[CONFIG]["url"], make_config()).status_code == 200


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        (b"{", make_weights(), f"{CONFIG}: "),
        (b'{"a":' * 50_000, make_weights(), f"{CONFIG}: "),
        (make_config(r=3), make_weights(rank=3), f"{CONFIG}: r = 3 must be the rank of lora_config, 2"),
        (make_config(use_dora=True), make_weights(), f"{CONFIG}: use_dora = True"),
        (make_config(), make_weights()[:-5], f"{WEIGHTS}: "),
        (make_config(), b"\xff" * 64, f"{WEIGHTS}: "),
        (
            make_config(),
            make_weights(np.nan),
            f"{WEIGHTS}: module '{MODULE[17:]}' contains numbers that are not finite",
        ),
        (make_config(), make_weights(inputs=8), f"{WEIGHTS}: lora_A of '{MODULE[17:]}' is (2, 8)"),
        (make_config(), make_weights(module="base_model.model.x"), f"{WEIGHTS}: module 'x' is not a trainable module"),
        (
            make_config(),
            make_weights(module=MODULE.replace("self_attn.q_proj", "mlp.up_proj")),
            f"{WEIGHTS}: it has modules of the group mlp, but lora_config has train_mlp = false",
        ),
        (make_config(), None, f"{WEIGHTS}: was not uploaded"),
    ],
)
def test_a_wrong_file_is_named(server: Server, config: bytes, weights: bytes | None, message: str) -> None:
    started = start(server)
    for name, content in ((CONFIG, config), (WEIGHTS, weights)):
        assert content is None or send(started["urls"][name], content).status_code == 200
    answer = finish(server, started["upload_id"])
    assert (answer.status_code, answer.json()["detail"][: len(message)]) == (400, message)
    assert server.client.get("/api/v1/checkpoints").json()["checkpoints"] == []


def test_files_have_the_size_that_rank_and_base_model_imply(server: Server) -> None:
    """The bound is the size of the largest file with these settings, and 1 MiB more."""
    started = start(server)
    (folder,) = list_uploads(server)
    bounds = json.loads((folder / "upload.json").read_text())["max_bytes"]
    assert len(make_weights()) < bounds[WEIGHTS] - 2**20 < 2**18 and bounds[CONFIG] == 2**20

    def stream() -> Iterator[bytes]:
        yield from [bytes(2**16)] * 40

    contents: tuple[Callable[[], Any], ...] = (lambda: bytes(bounds[WEIGHTS] + 1), stream)
    for make in contents:
        answer = send(started["urls"][WEIGHTS], make())
        assert answer.status_code == 413 and answer.json()["detail"].startswith(f"{WEIGHTS}: has ")
    assert [path.name for path in folder.iterdir()] == ["upload.json"]


def test_only_the_uploader_finishes(server: Server) -> None:
    started = start(server)
    bob = {"X-API-Key": create_key(server, "bob")}
    refused, unknown = (
        server.client.post("/api/v1/external_weights_upload_finish", json={"upload_id": name}, headers=bob)
        for name in (started["upload_id"], "upload-" + "0" * 32)
    )
    assert refused.status_code == unknown.status_code == 404
    assert refused.text.replace(started["upload_id"], "upload-" + "0" * 32) == unknown.text

    # A URL is valid for one file, as long as the key of the uploader is.
    url = started["urls"][CONFIG]
    for wrong in (url.replace(CONFIG, WEIGHTS), url[:-1] + ("0" if url[-1] != "0" else "1")):
        assert send(wrong, b"{}").status_code == 403
    server.client.delete("/api/v1/auth/apikey/me")
    assert "was revoked" in send(url, b"{}").json()["detail"]


def test_an_unfinished_upload_expires_and_leaves_nothing(server: Server) -> None:
    started = start(server)
    send(started["urls"][CONFIG], make_config())
    unfinished = Uploads(server.settings)
    assert sum(unfinished.count_bytes(None).values()) > len(make_config()), "the files count for their owner"
    unfinished.remove_expired(time.time())
    assert len(list_uploads(server)) == 1
    unfinished.remove_expired(time.time() + server.settings.download_url_ttl_s + 2)
    assert list_uploads(server) == [] and not unfinished.count_bytes(None)
    assert finish(server, started["upload_id"]).status_code == 404
    assert send(started["urls"][CONFIG], b"{}").status_code == 404


def test_an_owner_has_few_unfinished_uploads(server: Server) -> None:
    for _ in range(8):
        start(server)
    body = {"base_model": PUBLIC_NAME, "lora_config": LORA}
    assert server.post("external_weights_upload_start", **body).status_code == 429
    server.client.headers["X-API-Key"] = create_key(server, "bob")
    start(server)


def write_adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / CONFIG).write_bytes(make_config())
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def test_import_uploads_an_adapter(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a directory, and from the URLs of a checkpoint that another server sends."""

    def import_adapter(source: object) -> tuple[int, str, str]:
        return main(["import", str(source), "--server", server.url]), *capsys.readouterr()

    folder = write_adapter(tmp_path / "adapter", make_weights())
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    status, _, err = import_adapter(folder)
    assert status == 1 and "X-API-Key: missing" in err and "set $TINKER_API_KEY" in err
    monkeypatch.setenv("TINKER_API_KEY", server.client.headers["X-API-Key"])
    with serve_files(folder) as url:
        for source in (folder, url):
            status, out, err = import_adapter(source)
            assert (status, err) == (0, "") and out.count("/external_weights/uploaded") == 2
    status, _, err = import_adapter(write_adapter(tmp_path / "wrong", make_weights(inputs=8)))
    assert status == 1 and f"the server refused the adapter: {WEIGHTS}: lora_A" in err
    checkpoints = server.client.get("/api/v1/checkpoints").json()["checkpoints"]
    assert len(checkpoints) == 2, "the wrong adapter is not stored"


@contextmanager
def serve_files(folder: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model": "other"}, "base_model 'other'"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank 0: must be between 1 and 1024"),
        ({"lora_config": {"rank": 10**6}}, "lora_config.rank 1000000"),
        ({"lora_config": {"rank": 2, "alpha": 16}}, "alpha"),
    ],
)
def test_wrong_settings_are_refused(server: Server, changes: dict[str, Any], message: str) -> None:
    answer = server.post("external_weights_upload_start", **{"base_model": PUBLIC_NAME, "lora_config": LORA, **changes})
    assert answer.status_code == 400 and message in answer.json()["detail"]


@pytest.mark.slow
def test_uploaded_weights_are_trained_and_sampled(tmp_path: Path) -> None:
    """With the child process and the engine: a run saves the uploaded weights again, bit by bit."""
    with live_stack("jax", tmp_path) as stack:
        server = stack.server
        started = start(server)
        send(started["urls"][CONFIG], make_config())
        send(started["urls"][WEIGHTS], make_weights(np.nan))
        assert "not finite" in finish(server, started["upload_id"]).json()["detail"]
        send(started["urls"][WEIGHTS], make_weights())
        path = finish(server, started["upload_id"]).json()["tinker_path"]

        session = server.session()
        loaded = server.post("load_weights", session_id=session, model_seq_id=0, path=path)
        assert "error" not in server.result(loaded)
        server.result(server.post("save_weights_external", model_id=loaded.json()["model_id"], seq_id=1, path="again"))
        sampler = server.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path)
        sample = server.post(
            "asample",
            sampling_session_id=sampler.json()["sampling_session_id"],
            prompt={"chunks": [{"tokens": [1, 2, 3]}]},
            sampling_params={"max_tokens": 2},
        )
        assert len(server.result(sample)["sequences"]) == 1  # type: ignore[arg-type]

        # Compare the files.
        urls = [
            server.client.get(
                f"/api/v1/training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls"
            ).json()["urls"]
            for run, name in ((path.split("/")[2], "uploaded"), (loaded.json()["model_id"], "again"))
        ]
        first, second = (load(httpx.get(signed[WEIGHTS]).content) for signed in urls)
        assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
