"""Golden data directories that each release left after a SIGKILL, with expected results.

A golden file contains the data directory of a killed server (`data/`) and `record.json`. The record
lists the models, checkpoints and samplers in the directory, and the results that the release itself
computed when it continued from a copy. HEAD must compute the same results.
"""

import hashlib
import json
import sqlite3
import tarfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
BASE_MODEL = "fake"
"""The name under which golden servers serve the fake backend, with its default sizes."""
PROMPT = [5, 6, 7, 8]
Json = Any


@dataclass(kw_only=True)
class Record:
    """The content of a golden data directory, by the names that clients have for it."""

    version: str
    commit: str
    session_id: str = ""
    model_id: str = ""
    """A model with a snapshot, requests after it and a pending gradient."""
    replayed_model_id: str = ""
    """A model that only the log has."""
    next_seq_id: int = 0
    """The next sequence number of `model_id`. The next one of `replayed_model_id` is 3."""
    checkpoints: dict[str, str] = field(default_factory=dict[str, str])
    """The paths of named checkpoints, by kind."""
    samplers: list[str] = field(default_factory=list[str])
    """Sampling sessions: of a checkpoint, and two ephemeral samplers, the second with the snapshot's model."""
    unread: dict[str, str] = field(default_factory=dict[str, str])
    """Requests with a result that no client has read."""
    unfinished: dict[str, str] = field(default_factory=dict[str, str])
    """Requests without a result."""
    keys: dict[str, str] = field(default_factory=dict[str, str])
    """API keys by owner, the first the owner of everything else; empty if the release had none."""
    arithmetic: str = ""
    results: dict[str, Json] = field(default_factory=dict[str, Json])
    """The results of `continue_run` with the release's own code."""


class GoldenClient:
    """Calls a server as the SDK does."""

    def __init__(self, url: str, key: str | None) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key} if key else {}, timeout=60)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def post(self, endpoint: str, **body: Json) -> Json:
        """POST JSON and return the response's; asserts success."""
        answer = self._http.post(endpoint, json=body)
        assert answer.status_code == 200, f"{endpoint}: {answer.status_code} {answer.text}"
        return answer.json()

    def get(self, endpoint: str) -> Json:
        """Return the JSON at a path; asserts success."""
        answer = self._http.get(endpoint)
        assert answer.status_code == 200, f"{endpoint}: {answer.status_code} {answer.text}"
        return answer.json()

    def result(self, request_id: str) -> Json:
        """Wait for the result of a request; asserts that it succeeded."""
        while (answer := self._http.post("retrieve_future", json={"request_id": request_id})).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.json(), answer.text
        return answer.json()

    def call(self, endpoint: str, **body: Json) -> Json:
        """POST a request and wait for its result."""
        return self.result(self.post(endpoint, **body)["request_id"])

    def forward_backward(self, model_id: str, seq_id: int, start: int = 1) -> str:
        """Submit a pass over two sequences; return its request id."""
        data = [_datum(start, 6), _datum(start + 40, 4)]
        passed = {"loss_fn": "cross_entropy", "data": data}
        answer = self.post("forward_backward", model_id=model_id, seq_id=seq_id, forward_backward_input=passed)
        return answer["request_id"]

    def optim_step(self, model_id: str, seq_id: int) -> str:
        """Submit a step of AdamW with weight decay; return its request id."""
        adam = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.1}
        return self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params=adam)["request_id"]

    def sample(self, sampling_session_id: str, seq_id: int) -> str:
        """Submit two samples of eight tokens with a fixed seed; return the request id."""
        answer = self.post(
            "asample",
            sampling_session_id=sampling_session_id,
            seq_id=seq_id,
            num_samples=2,
            prompt={"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]},
            sampling_params={"max_tokens": 8, "seed": 7, "temperature": 0.8, "stop": []},
        )
        return answer["request_id"]


def _datum(start: int, length: int) -> Json:
    tokens = [(start + 3 * index) % 200 + 1 for index in range(length + 1)]
    return {
        "model_input": {"chunks": [{"tokens": tokens[:-1], "type": "encoded_text"}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [length]},
            "weights": {"data": [1.0] * length, "dtype": "float32", "shape": [length]},
        },
    }


def logprobs(result: Json) -> Json:
    """Return the log-probabilities of a pass, and its loss."""
    outputs = [output["logprobs"]["data"] for output in result["loss_fn_outputs"]]
    return {"logprobs": outputs, "loss": result["metrics"]["loss:sum"]}


def sequences(result: Json) -> Json:
    """Return tokens and log-probabilities of samples."""
    return [{"tokens": sequence["tokens"], "logprobs": sequence["logprobs"]} for sequence in result["sequences"]]


def continue_run(client: GoldenClient, record: Record, data_dir: Path) -> dict[str, Json]:
    """Read what is left, train and sample on, and return all numbers, with hashes of saved weights."""
    found: dict[str, Json] = {}
    for name, request_id in {**record.unread, **record.unfinished}.items():
        result = client.result(request_id)
        found[name] = sequences(result) if "sequences" in result else logprobs(result)
    for index, name in enumerate(record.samplers):
        found[f"sampler {index}"] = sequences(client.result(client.sample(name, 10)))
    model_id, seq_id = record.model_id, record.next_seq_id
    stepped = client.optim_step(model_id, seq_id)
    passed = client.forward_backward(model_id, seq_id + 1, start=17)
    client.result(stepped)
    found["next loss"] = logprobs(client.result(passed))
    client.result(client.optim_step(model_id, seq_id + 2))
    saved = client.call("save_weights", model_id=model_id, seq_id=seq_id + 3, path="after")["path"]
    found["weights"] = hash_weights(data_dir, saved)
    found["replayed loss"] = logprobs(client.result(client.forward_backward(record.replayed_model_id, 3, start=17)))
    path = record.checkpoints["weights"]
    loaded = {"session_id": record.session_id, "model_seq_id": 9, "path": path, "optimizer": True}
    loaded_id = client.call("load_weights", **loaded)["model_id"]
    passed = client.forward_backward(loaded_id, 1, start=17)
    client.result(client.optim_step(loaded_id, 2))
    found["loaded loss"] = logprobs(client.result(passed))
    found["loaded next loss"] = logprobs(client.result(client.forward_backward(loaded_id, 3, start=18)))
    for kind, path in record.checkpoints.items():
        found[f"checkpoint {kind}"] = hash_weights(data_dir, path)
    listed = client.get(f"training_runs/{model_id}/checkpoints")["checkpoints"]
    found["listed"] = sorted([checkpoint["tinker_path"], checkpoint["public"]] for checkpoint in listed)
    return found


def hash_weights(data_dir: Path, path: str) -> dict[str, str]:
    """Return the SHA-256 of each weight file of a checkpoint."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    with closing(sqlite3.connect(data_dir / "skyrl_tx.db")) as connection:
        (artifact_id,) = connection.execute(
            "SELECT artifact_id FROM checkpoints WHERE model_id = ? AND kind = ? AND name = ?", (model_id, kind, name)
        ).fetchone()
    files = sorted((data_dir / "artifacts" / artifact_id).glob("*.safetensors"))
    assert files, path
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def hash_arithmetic() -> str:
    """Return a hash of the functions of the fake backend that numpy computes differently on other processors."""
    values = np.linspace(-20.0, 20.0, 512)
    table = values.reshape(256, 2)
    parts = np.exp(values), np.log(np.abs(values) + 0.1), table @ table[7], table[:6].T @ np.exp(table[:6]), table.sum()
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def write_golden(file: Path, data_dir: Path, record: Record) -> None:
    """Write a golden file, without locks and sockets."""
    (data_dir.parent / "record.json").write_text(json.dumps(asdict(record), indent=1))
    with tarfile.open(file, "w:xz", preset=9) as archive:
        archive.add(data_dir.parent / "record.json", "record.json", filter=_anonymous)
        archive.add(data_dir, "data", filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    is_kept = member.isdir() or (member.isfile() and not member.name.endswith((".lock", "-shm")))
    return member if is_kept else None


def read_golden(file: Path, directory: Path) -> tuple[Path, Record]:
    """Unpack a golden file; return the data directory and the record."""
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4
    with tarfile.open(file) as archive:
        archive.extractall(directory, **options)
    values: Mapping[str, Json] = json.loads((directory / "record.json").read_text())
    return directory / "data", Record(**values)
