"""Known attacks on vLLM, Ollama, Ray, Jupyter and the libraries of this server fail here.

Each has a CVE number.

docs/internals/reliability.md lists the attacks with their tests in this file and other files.
"""

import ast
import json
import os
import pickle
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard

import skyrl_tx
from skyrl_tx.engine.sample_requests import StopStringMatcher
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.store import keys
from skyrl_tx.weights import peft
from tests.support.engine_harness import EngineHarness, sample
from tests.support.live_api import Server, live_api
from tests.support.live_stack import live_stack, small_backend

CANARY = "the canary"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with live_stack("fake", tmp_path_factory.mktemp("stack")) as stack:
        yield stack.server


@pytest.fixture(scope="module")
def sampler(server: Server) -> str:
    base_model = server.settings.public_model_name
    answer = server.post(
        "create_sampling_session", session_id=server.session(), sampling_session_seq_id=0, base_model=base_model
    )
    return answer.json()["sampling_session_id"]


def asample(server: Server, sampler: str, **body: Any) -> httpx.Response:
    params = {"max_tokens": 1, **body.pop("params", {})}
    whole = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": params, **body}
    return server.post("asample", sampling_session_id=sampler, **whole)


def get_error(server: Server, answer: httpx.Response) -> str:
    result = server.result(answer)
    assert result["category"] == "user", result
    return str(result["error"])


def test_empty_prompt(server: Server, sampler: str) -> None:
    """CVE-2024-8768: an empty prompt ended the vLLM server."""
    for chunks in ([], [{"tokens": []}]):
        assert "no tokens" in get_error(server, asample(server, sampler, prompt={"chunks": chunks}))


@pytest.mark.parametrize("count", [4097, 2**31, 2**63])
def test_many_samples_of_one_prompt(server: Server, sampler: str, count: int) -> None:
    """CVE-2024-8939, CVE-2026-34756: a large `best_of` or `n` of one request exhausted vLLM."""
    assert "num_samples" in get_error(server, asample(server, sampler, num_samples=count))


def test_many_log_probabilities_of_one_request(tmp_path: Path) -> None:
    """CVE-2024-8939: the product of samples and their length is also bounded, before any sample starts."""
    harness = EngineHarness(tmp_path)
    harness.config = harness.config.model_copy(update={"max_context_length": 2**17, "max_sample_tokens": 2**17})
    try:
        failed = harness.answer(replace(sample(max_tokens=2**16), num_samples=4000))
        assert "num_samples 4000 x max_tokens 65536" in failed.message and failed.category.value == "user"
    finally:
        harness.close()


def test_many_stop_strings_are_refused_before_they_are_stored(server: Server, sampler: str) -> None:
    """CVE-2025-48887: matching sampled text with a pattern took exponential time in vLLM.

    This server matches stop strings.
    """
    many = [f"stop {index}" for index in range(65)]
    assert "sampling_params.stop has 65 strings" in get_error(server, asample(server, sampler, params={"stop": many}))
    long = "x" * 1001
    assert "has 1001 characters" in get_error(server, asample(server, sampler, params={"stop": long}))
    tokens = list(range(4097))
    assert "stop has 4097 tokens" in get_error(server, asample(server, sampler, params={"stop": tokens}))
    assert "sequences" in server.result(asample(server, sampler, params={"stop": many[:64]}))


@pytest.mark.parametrize("stops", [tuple(map(str, range(1_000_000))), ("x" * 1001,)])
def test_many_stop_strings_of_an_earlier_release_fail_in_the_engine(tmp_path: Path, stops: tuple[str, ...]) -> None:
    """As above, for a request that was stored before the API had the limit."""
    harness = EngineHarness(tmp_path)
    try:
        failed = harness.answer(sample(stop_strings=stops))
        assert "sampling_params.stop" in failed.message and failed.category.value == "user"
    finally:
        harness.close()


def test_long_stop_strings_decode_little_text_again() -> None:
    """As above: each step decodes only the text in which a stop string may have started."""
    decoded = 0

    def decode(tokens: list[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return "word " * len(tokens)

    matcher = StopStringMatcher(["\U0010ffff" * 1000], decode)
    for _ in range(100):
        assert matcher.feed([7] * 16) is None
    assert decoded < 100 * 1000, "a step reads twice the tokens of a thousand characters"


@pytest.mark.parametrize(
    "name", ["guided_json", "guided_regex", "response_format", "tools", "logit_bias", "best_of", "chat_template"]
)
def test_fields_of_other_servers_are_refused(server: Server, sampler: str, name: str) -> None:
    """Schemas, patterns and chat templates in requests stopped vLLM.

    This server compiles none of them.

    CVE-2025-48942: schema. CVE-2025-48943, CVE-2025-48944: pattern. CVE-2025-61620: template.
    """
    assert name in get_error(server, asample(server, sampler, params={name: "(a+)+$"}))


def test_urls_of_media_are_not_fetched(server: Server, sampler: str) -> None:
    """CVE-2025-6242: vLLM fetched image URLs, including URLs of its internal network."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        location = f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"
        chunk = {"type": "image_asset_pointer", "location": location, "format": "png"}
        assert "image_asset_pointer" in get_error(server, asample(server, sampler, prompt={"chunks": [chunk]}))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("column", [5, 2**40, 2**62, -1, -(2**63)])
def test_sparse_tensor_with_an_index_outside_its_shape(server: Server, column: int) -> None:
    """CVE-2025-62164: vLLM wrote beyond the memory of a client's sparse tensor."""
    message = wire_pb2.ForwardBackwardRequest(model_id=server.model(), seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.ones(2, np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.shape[:] = wire_pb2.DTYPE_INT64, [2, 5]

    tensor.sparse_csr.values = np.ones(1, np.int64).tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 1], np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array([column], np.int64).tobytes()
    answer = server.client.post(
        "/api/v1/forward_backward",
        content=message.SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    assert "a column index is outside [0, 5)" in get_error(server, answer)


class _DirectoryCreator:
    """An object whose unpickling creates a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors", "adapter_config.json"])
def test_pickled_weights_are_not_read(tmp_path: Path, name: str) -> None:
    """CVE-2025-24357, CVE-2025-32434, CVE-2024-11041: loading weights or messages with pickle executed code."""
    directory, proof = tmp_path / "adapter", tmp_path / "executed"
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / name).write_bytes(pickle.dumps(_DirectoryCreator(proof)))
    with pytest.raises(peft.AdapterError):
        peft.read_adapter(directory)
    assert not proof.exists()


def test_no_module_can_unpickle_or_evaluate_text() -> None:
    """As above, for the whole package: no module imports or calls a function that executes its input."""
    package = Path(skyrl_tx.__file__).parent
    found: list[str] = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Call):
                names.append(ast.unparse(node.func))
            found += [f"{path.relative_to(package)}: {name}" for name in names if name in _EXECUTES]
    assert found == []


_EXECUTES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "eval", "exec", "torch.load", "np.load", "yaml.load"}


def test_code_of_a_model_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-66448: vLLM executed code that a model's configuration named.

    A question on the terminal would block the engine.
    """
    model, backend = small_backend("jax", tmp_path)
    for name, auto_map in {
        "config.json": {"AutoConfig": "evil.Evil"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Evil", None]},
    }.items():
        content = json.loads((Path(model) / name).read_text())
        changed = {"auto_map": auto_map, "model_type": "evil", "tokenizer_class": "Evil"}
        (Path(model) / name).write_text(json.dumps({**content, **changed}))

    (Path(model) / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\nclass Evil: pass\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or "y")
    backend.start()
    with pytest.raises(ValueError, match="custom code"):
        backend.text_of([1])
    assert not asked and not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../../x",
        "a/../../b",
        "/etc/passwd",
        "a\0b",
        ".hidden",
        "%2e%2e%2fx",
        "..\\x",
        "\N{FULLWIDTH FULL STOP}" * 2,
    ],
)
def test_checkpoint_names_stay_in_their_directory(server: Server, name: str) -> None:
    """CVE-2024-37032, CVE-2024-45436: names from the client escaped Ollama's model directory."""
    model_id = server.model()
    for endpoint in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
        refused = server.post(endpoint, model_id=model_id, path=name)
        if refused.status_code != 400:
            error = get_error(server, refused)
            assert "checkpoint name" in error or "must not contain U+0000" in error, endpoint
    path = f"tinker://{model_id}/weights/{name}"
    assert server.post("weights_info", tinker_path=path).status_code in (400, 404)


@pytest.mark.parametrize(
    "file",
    ["../../signing.key", "..%2f..%2fsigning.key", "%2e%2e/%2e%2e/signing.key", "/etc/passwd", "..;/signing.key"],
)
def test_download_paths_stay_in_their_directory(server: Server, file: str) -> None:
    """CVE-2023-6020, CVE-2023-6021: URLs read any file of Ray's machine.

    CVE-2024-39722: a path revealed which files exist on Ollama's machine.
    """
    model_id = server.model()
    server.result(server.post("save_weights_external", model_id=model_id, path="out", seq_id=1))
    signed = server.client.get(
        f"/api/v1/training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls"
    )
    url: str = signed.json()["urls"]["adapter_config.json"]
    assert server.client.get(url).status_code == 200
    stolen = server.client.get(url.replace("adapter_config.json", file))
    assert stolen.status_code in (403, 404)


def test_many_ranges_of_a_download(server: Server) -> None:
    """CVE-2025-62727: a Range header with many ranges took quadratic time in Starlette's file response."""
    model_id = server.model()
    server.result(server.post("save_weights_external", model_id=model_id, path="out", seq_id=1))
    signed = server.client.get(
        f"/api/v1/training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls"
    )
    url: str = signed.json()["urls"]["adapter_config.json"]
    started = time.process_time()
    ranges = "bytes=" + ",".join(f"{index}-" for index in range(6000))
    answer = server.client.get(url, headers={"Range": ranges})
    assert answer.status_code == 431, "the header exceeds the limit of the head"

    answer = server.client.get(url, headers={"Range": ranges[:16_000]})
    assert answer.status_code == 200, "a server may ignore ranges"
    assert time.process_time() - started < 5


def test_decompression_bomb(server: Server) -> None:
    """CVE-2024-12886: a small compressed response from another server exhausted Ollama.

    Here the bomb is a request.
    """
    for size in (2**20, 2**30):
        bomb = zstandard.ZstdCompressor().compress(b"\0" * size)
        answer = server.client.post("/api/v1/create_session", content=bomb, headers={"content-encoding": "zstd"})
        assert answer.status_code == 413 and "decompresses" in answer.json()["detail"]


def test_deeply_nested_bodies(server: Server) -> None:
    """CVE-2025-4565: nested messages and groups exceeded the recursion limit of Python's own protobuf parser."""
    for nested in (b"\x1b" * 50_000, b"\x1b" * 50_000 + b"\x1c" * 50_000, b"\x1a\x02" * 10):
        answer = server.client.post(
            "/api/v1/forward_backward", content=nested, headers={"content-type": "application/x-protobuf"}
        )
        assert answer.status_code in (400, 404, 413)
    for text in ("[" * 100_000, '{"a":' * 8000 + "0" + "}" * 8000, '{"x":' + "[" * 900 + "]" * 900 + "}"):
        assert server.client.post("/api/v1/create_session", content=text).status_code in (200, 400, 413)


@pytest.mark.parametrize("digits", [4000, 900_000])
def test_long_numbers(server: Server, digits: int) -> None:
    """CVE-2020-10735: the conversion of a long number takes quadratic time."""
    started = time.process_time()
    body = '{"session_id": "s", "model_seq_id": ' + "9" * digits + "}"
    assert server.client.post("/api/v1/create_model", content=body).status_code == 400
    assert time.process_time() - started < 5


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_web_pages_are_refused_whatever_the_method(server: Server, method: str) -> None:
    """CVE-2026-27482: Ray refused POST and PUT from web pages, but executed DELETE."""
    path = f"/api/v1/training_runs/{server.model()}/checkpoints/weights/a"
    assert server.client.request(method, path, headers={"Origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize("host", ["localhost/api/v1/healthz?", "localhost/api/v1/healthz#", "localhost/livez?a@b"])
def test_the_host_header_does_not_change_the_path(tmp_path: Path, host: str) -> None:
    """CVE-2026-48746: vLLM's authentication took the path from a URL that contained the Host header."""
    with live_api(ApiSettings(port=0, data_dir=tmp_path, base_model="fake")) as keyed:
        keyed.store.write(lambda tx: keys.create(tx, owner="ann", scope="admin", name="a", note="", now=1.0))
        answer = keyed.client.get("/api/v1/sessions?access_scope=accessible", headers={"Host": host})
        assert answer.status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n", id="end of a chunk"),
        pytest.param(b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n", id="two lengths"),
        pytest.param(b"Transfer-Encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n", id="unknown encoding"),
        pytest.param(b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", id="two content lengths"),
        pytest.param(b"Transfer-Encoding : chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", id="space after a name"),
    ],
)
def test_ambiguous_bodies_are_refused(server: Server, body: bytes) -> None:
    """CVE-2025-43859: h11 accepted chunks with a wrong end, so a proxy and the server saw different requests."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\n" + body)
        received = b""
        while piece := connection.recv(1000):
            received += piece
    assert received.startswith(b"HTTP/1.1 400 ") and received.count(b"HTTP/1.1") == 1


def test_errors_show_no_paths_and_no_traces(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """CVE-2023-49080: Jupyter returned tracebacks with paths. CVE-2026-22778: vLLM returned a memory address.

    CVE-2022-24758: Jupyter logged the headers of failed requests, including its keys.
    """

    async def fail() -> None:
        raise OSError(f"{CANARY} at {server.settings.data_dir}")

    server.api.app.add_api_route("/broken", fail, methods=["POST"])
    keys_sent = {"X-API-Key": "tml-secret-1", "Authorization": "Bearer tml-secret-2", "Cookie": "tml-secret-3"}
    text = server.client.post("/broken", headers=keys_sent).text
    assert CANARY not in text and str(server.settings.data_dir) not in text and "reference" in text
    assert CANARY in caplog.text and "tml-secret" not in caplog.text
