"""Measures what the calls of one owner cost another owner (`make neighbour`, ten minutes on an idle machine).

Ann calls one route on many connections, with its largest legal input. Meanwhile Bob sends heartbeats and samples of
four tokens. Printed are Bob's times with and without Ann's calls, on SQLite and PostgreSQL, with the fake backend.
The program exits with 1 if Bob's 95th percentile is longer than the target of a route.
"""

import argparse
import http.client
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path

import numpy as np
from sqlmodel import Session

from benchmarks.common import quantile
from skyrl_tx.apps.history.logged_metrics import LoggedPointRow, LoggedRunRow
from skyrl_tx.contract import codec, requests, results
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, ModelId, SessionId, model_id
from skyrl_tx.store import futures, keys, models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.live_server import LiveServer
from tests.support.postgresql_server import PostgresqlServer
from tests.support.s3_server import variables
from tests.support.tiny_tokenizer import VOCAB_SIZE

CONTROL_S, DATA_S = 0.25, 1.0
"""Targets: how much longer Bob's calls may take beside lists and text, and beside bodies and results of 64 MiB."""
NUM_RUNS, NUM_SESSIONS, NUM_POINTS = 300, 40, 3000
RESULT_NUMBERS = 3 * 2**20
"""Numbers of the large result: 12 MiB in the database, and about 64 MiB as JSON."""
PAUSE_S = 0.02
SETTLE_S = 3.0
"""Time between Ann's first calls and the first call of Bob that is measured."""
WEIGHTS = "weights urls, silent store"
UPLOAD = {"base_model": "fake", "lora_config": {"rank": 8}}
CONTEXT = 2**20
"""The longest prompt, so that a text of 4 MiB fits."""
COUNTER = "00000000"
CHAT = "/v1/chat/completions"
STREAM = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4000, "stream": True, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Load:
    """The calls of Ann. With `is_stalled`, her clients do not read the responses.

    `COUNTER` in the body is another number in each call.
    """

    name: str
    limit_s: float
    num_connections: int
    path: str
    body: Mapping[str, object] | None = None
    num_numbers: int = 0
    """Adds a prompt of this many tokens to the body."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    is_stalled: bool = False
    is_refused: bool = False
    """Whether the server refuses the calls with 400. Otherwise a call that is refused is an error."""
    has_grammar: bool = False
    """Whether Bob also sends samples with a grammar."""


@dataclass(frozen=True, slots=True)
class Fixture:
    """The data of Ann and Bob in a database."""

    ann: str
    bob: str
    session_id: str
    run_id: str
    logged_run_id: int
    request_id: str


def fill(store: Store) -> Fixture:
    """Write the rows that Ann's calls read."""
    now = time.time()
    metadata = {f"name-{index}": "x" * 1000 for index in range(60)}
    values = {f"metric/{index}": index / 7 for index in range(100)}
    spec = codec.encode(requests.ModelSpec(lora=requests.LoraSpec(rank=8, seed=1)))

    # Keys, sessions and runs
    def add_runs(tx: Session) -> tuple[str, str, SessionId, list[ModelId]]:
        ann, _ = keys.create(tx, owner="ann", scope="user", name="ann", note="", now=now)
        bob, _ = keys.create(tx, owner="bob", scope="user", name="bob", note="", now=now)
        ids = [sessions.create(tx, owner="ann", now=now, user_metadata=metadata) for _ in range(NUM_SESSIONS)]
        tx.flush()

        runs = [model_id(ids[0], number) for number in range(NUM_RUNS)]
        for number, run in enumerate(runs):
            row = ModelRow(
                model_id=run,
                session_id=ids[0],
                base_model="fake",
                spec=spec,
                status="unloaded",
                created_at=now,
                last_request_at=now,
            )
            models.create(tx, row)

            for step in range(5):
                saved = CheckpointRow(
                    model_id=run,
                    kind=CheckpointKind.EXTERNAL,
                    name=f"{step}",
                    artifact_id=ArtifactId(f"art-{number:016x}{step:016x}"),
                    created_at=now + step,
                    size_bytes=1,
                )
                tx.add(saved)

        return ann, bob, ids[0], runs

    ann, bob, session_id, runs = store.write(add_runs)

    # A logged run with long values, and a large result
    def add_values(tx: Session) -> int:
        run = LoggedRunRow(
            owner="ann", project="p", key="k", name="n", model_id=runs[0], created_at=now, last_at=now, config={}
        )
        tx.add(run)
        tx.flush()
        run_id = run.logged_run_id or 0
        for step in range(NUM_POINTS):
            tx.add(LoggedPointRow(logged_run_id=run_id, log_id=str(step), step=step, at=now, values=values))
        return run_id

    def add_result(tx: Session) -> str:
        new = futures.NewRequest(
            key="", kind="model_pass", owner="ann", session_id=session_id, model_id=runs[0], body=b"x"
        )
        submitted = futures.submit(tx, new, now)
        logprobs = np.random.default_rng(1).random(RESULT_NUMBERS, np.float32)
        encoded = codec.encode(results.ForwardBackwardOutput(logprobs=(logprobs,), metrics={}))
        futures.complete(tx, submitted.request_id, encoded, failed=False, effect_order=None, now=now)
        return submitted.request_id

    return Fixture(ann, bob, session_id, runs[0], store.write(add_values), store.write(add_result))


def list_loads(fixture: Fixture) -> list[Load]:
    """Return the calls of Ann."""
    api, run = "/api/v1", f"/api/v1/training_runs/{fixture.run_id}"
    poll, poll_path = {"request_id": fixture.request_id}, f"{api}/retrieve_future"
    sample = {"base_model": "fake", "num_samples": 1, "sampling_params": {}}
    text = {"model": "fake", "prompt": " number" * (4 * 2**20 // 7), "max_tokens": 4}  # one token per word
    chart = f"/console/data/training_runs/{fixture.run_id}/curves"

    # Lists, pages, streams and text
    control = [
        Load("sessions/search", CONTROL_S, 150, f"{api}/sessions/search", {"limit": 200}),
        Load("checkpoints/search", CONTROL_S, 150, f"{api}/checkpoints/search", {"limit": 200}),
        Load("training_runs", CONTROL_S, 120, f"{api}/training_runs?limit=10000"),
        Load("checkpoints", CONTROL_S, 120, f"{api}/checkpoints?limit=10000"),
        Load("run metrics", CONTROL_S, 20, f"{run}/metrics?limit=5000"),
        Load(WEIGHTS, CONTROL_S, 120, f"{run}/checkpoints/external_weights/0/external_weights_urls"),
        # Starts the process that reads adapters, one at a time
        Load("upload start", CONTROL_S, 20, f"{api}/external_weights_upload_start", UPLOAD),
        Load("console curves", CONTROL_S, 12, chart),
        Load("streams, unread", CONTROL_S, 64, "/v1/completions", STREAM, is_stalled=True),
    ]

    # Results and bodies of 64 MiB
    data = [
        Load("result, size only", DATA_S, 8, poll_path, {**poll, "allow_metadata_only": True}),
        Load("result, JSON", DATA_S, 8, poll_path, poll),
        Load("result, protobuf", DATA_S, 8, poll_path, poll, headers={"Accept": "application/x-protobuf"}),
        Load("result, unread", DATA_S, 16, poll_path, poll, is_stalled=True),
        Load("sample, 64 MiB of JSON", DATA_S, 4, f"{api}/asample", sample, num_numbers=16 * 2**20),
    ]
    rows = [*control, *data, *list_grammar_loads()]
    return [*rows, Load("text of 4 MiB", CONTROL_S, 4, "/v1/completions", text)]


def list_grammar_loads() -> list[Load]:
    """Return calls whose samples are constrained by grammars that are large, or take long to compute."""
    names = [f"value-{number:052d}" for number in range(1024)]
    properties = {f"p{number}": {"type": "string", "format": "date-time"} for number in range(1000)}
    remainders = {f"p{number}": {"type": "integer", "multipleOf": 997 + number} for number in range(300)}
    ambiguous = "root ::= s\ns ::= " + " | ".join(f's s "{number}"' for number in range(800)) + f' | "{COUNTER}"'

    def constrain(name: str, *, is_refused: bool = False, **fields: object) -> Load:
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}
        return Load(name, CONTROL_S, 16, CHAT, body, is_refused=is_refused, has_grammar=True)

    def follow(schema: Mapping[str, object]) -> Mapping[str, object]:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    return [
        constrain("grammar, none"),  # for comparison
        constrain("grammar, equal enums", response_format=follow({"enum": names})),
        constrain("grammar, enums", response_format=follow({"enum": [COUNTER, *names]})),
        constrain("grammar, properties", response_format=follow({"title": COUNTER, "properties": properties})),
        constrain(
            "grammar, multiples", response_format=follow({"title": COUNTER, "properties": remainders}), is_refused=True
        ),
        constrain("grammar, regex", structured_outputs={"regex": f"{'[a-z]{1,30}|' * 680}{COUNTER}"}),
        constrain("grammar, ambiguous", structured_outputs={"grammar": ambiguous}, is_refused=True),
    ]


def run_load(url: str, key: str, cookie: str, load: Load, sent: Semaphore, stop: Event) -> None:
    """Make Ann's calls on all connections until `stop` is set. Runs in a separate process.

    `sent` is released for each call. Raises RuntimeError if the server gave an unexpected response.
    """
    body = None if load.body is None else dict(load.body)
    if load.num_numbers and body is not None:
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [7] * load.num_numbers}]}
    content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
    headers = {"X-API-Key": key, "Cookie": cookie, "Content-Type": "application/json", **load.headers}
    expected = {400 if load.is_refused else 200, 408, 429, 503}
    counter, problems = itertools.count(10_000_000), list[str]()

    def call_repeatedly() -> None:
        while not stop.is_set():
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
            try:
                while not stop.is_set():
                    sending = content and content.replace(COUNTER.encode(), str(next(counter)).encode())
                    connection.request("GET" if content is None else "POST", load.path, sending, headers)
                    sent.release()
                    if load.is_stalled:
                        stop.wait()
                        return

                    response = connection.getresponse()
                    if response.status not in expected:
                        problems.append(f"{load.name}: {response.status} {response.read(300)!r}")
                        return
                    while response.read(2**18):
                        pass
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
            finally:
                connection.close()

    threads = [threading.Thread(target=call_repeatedly, daemon=True) for _ in range(load.num_connections)]
    for thread in threads:
        thread.start()
    stop.wait()
    if problems:
        raise RuntimeError(problems[0])


class Bob:
    """The other owner, who measures his calls."""

    def __init__(self, url: str, key: str) -> None:
        self._host = url.removeprefix("http://")
        self._headers = {"X-API-Key": key, "Content-Type": "application/json"}
        self._connection = http.client.HTTPConnection(self._host, timeout=120)
        self._numbers = itertools.count()
        self._session = self._post("create_session", tags=[], sdk_version="0.38.0")["session_id"]

    def beat(self) -> None:
        """Send a heartbeat."""
        self._post("session_heartbeat", session_id=self._session)

    def sample(self) -> None:
        """Sample four tokens."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        sample = {"base_model": "fake", "prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 4}}
        request_id = self._post("asample", **sample)["request_id"]
        while self._post("retrieve_future", request_id=request_id).get("type") == "try_again":
            pass

    def sample_by_grammar(self) -> None:
        """Sample a token by a regular expression. More tokens would take a round each."""
        grammar = {"regex": f"[a-z]{{3}}{next(self._numbers)}"}
        body = {"model": "fake", "prompt": "Hello", "max_tokens": 1, "structured_outputs": grammar}
        self._connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        response = self._connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"grammar of Bob: {response.status} {text[:300]!r}")

    def stream(self) -> None:
        """Read the first token of a stream. It takes as long as the whole stream if Bob gets no place."""
        connection = http.client.HTTPConnection(self._host, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(STREAM), self._headers)
        response = connection.getresponse()
        response.readline()
        connection.close()

    def _post(self, endpoint: str, **body: object) -> dict[str, str]:
        self._connection.request("POST", f"/api/v1/{endpoint}", json.dumps(body), self._headers)
        response = self._connection.getresponse()
        text = response.read()
        if response.status not in (200, 408):
            raise RuntimeError(f"{endpoint} of Bob: {response.status} {text[:300]!r}")
        return json.loads(text)


def measure(bob: Bob, seconds: float, *, with_samples: bool, with_grammar: bool = False) -> dict[str, list[float]]:
    """Return the times of Bob's calls, by kind."""
    calls = {"heartbeat": bob.beat} | ({"sample": bob.sample} if with_samples else {})
    calls |= {"sample, grammar": bob.sample_by_grammar} if with_grammar else {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.monotonic() + seconds
    while time.monotonic() < end or not all(times.values()):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
            time.sleep(PAUSE_S)
    return times


@contextmanager
def calling(url: str, key: str, cookie: str, load: Load) -> Generator[None]:
    """Make Ann's calls while the context is open."""
    context = multiprocessing.get_context("spawn")
    sent, stop = context.Semaphore(0), context.Event()
    process = context.Process(target=run_load, args=(url, key, cookie, load, sent, stop), daemon=True)
    process.start()
    try:
        for _ in range(load.num_connections):  # the process imports for some seconds
            if not sent.acquire(timeout=60):
                raise RuntimeError(f"{load.path}: a call could not be sent in 60 s")
        time.sleep(SETTLE_S)
        yield
    finally:
        stop.set()
        process.join(10)
        process.kill()

    if process.exitcode == 1:
        raise RuntimeError(f"{load.name}: a call failed, see above")


def log_in(url: str, key: str) -> str:
    """Log in to the console and return the cookie."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Origin": url, "Sec-Fetch-Site": "same-origin"}
    connection.request("POST", "/login", f"key={key}", headers)
    return str(connection.getresponse().getheader("set-cookie")).partition(";")[0]


@contextmanager
def silent_object_store() -> Generator[str]:
    """Yield the address of an object store that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def report(database: str, load: Load, kind: str, alone: Sequence[float], beside: Sequence[float]) -> bool:
    """Print one row. Return whether the target is met."""
    more = quantile(beside, 0.95) - quantile(alone, 0.95)
    is_met = more <= load.limit_s
    cells = [database, load.name, kind, f"{statistics.median(alone):.3f}", f"{statistics.median(beside):.3f}"]
    cells += [f"{quantile(beside, 0.95):.3f}", f"{max(beside):.3f}", f"{more:+.3f}", "yes" if is_met else "NO"]
    print(f"| {' | '.join(cells)} |", flush=True)
    return is_met


def run(database: str, url: str | None, seconds: float, only: Sequence[str]) -> bool:
    """Measure all routes on one database. Return whether all targets are met."""
    is_met = True
    with tempfile.TemporaryDirectory() as name, silent_object_store() as object_store:
        directory, flags = Path(name), ["--base-model", "fake", "--backend", "fake"]
        flags += [] if url is None else ["--database-url", url]
        model = write_tiny_model(directory / "tokenizer")
        flags += ["--tokenizer-id", str(model), "--tool-parser", "hermes"]
        flags += ["--backend-config.tokenizer-file", str(model / "tokenizer.json")]
        flags += ["--backend-config.vocab-size", str(VOCAB_SIZE), "--backend-config.max-context-length", str(CONTEXT)]
        with closing(Store.open(directory / "data", role="tool", url=url)) as store:
            fixture = fill(store)
        loads = [load for load in list_loads(fixture) if not only or any(word in load.name for word in only)]

        with LiveServer(directory / "data", flags=flags) as server:
            bob, cookie = Bob(server.url, fixture.bob), log_in(server.url, fixture.ann)
            alone = measure(bob, seconds, with_samples=True, with_grammar=True)
            for load in loads:
                if load.name == WEIGHTS:
                    continue
                with calling(server.url, fixture.ann, cookie, load):
                    beside = measure(bob, seconds, with_samples=True, with_grammar=load.has_grammar)
                    if load.is_stalled and load.body is STREAM:
                        started = time.perf_counter()
                        bob.stream()
                        beside["first token"] = [time.perf_counter() - started]
                        alone["first token"] = alone["sample"]
                for kind, times in beside.items():
                    is_met &= report(database, load, kind, alone[kind], times)

        # The API alone, because an engine does not start without its object store
        for load in loads:
            if load.name == WEIGHTS:
                flags += ["--artifacts", "s3://bucket"]
                environment = {**os.environ, **variables(object_store)}
                with LiveServer(directory / "data", command="api", flags=flags, environment=environment) as server:
                    bob = Bob(server.url, fixture.bob)
                    alone = measure(bob, seconds, with_samples=False)
                    with calling(server.url, fixture.ann, "", load):
                        beside = measure(bob, seconds, with_samples=False)
                is_met &= report(database, load, "heartbeat", alone["heartbeat"], beside["heartbeat"])
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long Bob measures beside each route")
    parser.add_argument("--sqlite-only", action="store_true", help="leave out PostgreSQL")
    parser.add_argument("--only", nargs="*", default=[], help="measure only routes whose names contain these words")
    options = parser.parse_args()

    print("| database | route | Bob's call | alone, median s | beside, median s | p95 s | max s | more, p95 s | met |")
    print("|---|---|---|---|---|---|---|---|---|")
    is_met = run("sqlite", None, options.seconds, options.only)
    if not options.sqlite_only:
        with PostgresqlServer() as server:
            is_met &= run("postgresql", server.new_database(), options.seconds, options.only)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
