"""The processes of deploy/compose.engines.yaml: three tenants train while engines are killed and restarted.

PostgreSQL, an S3 server, the API and two engines run as processes instead of containers, with the
commands and variables of the file.
"""

import html
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.tools.cli import main
from tests.serve.test_postgresql import in_background
from tests.support.client_environments import OBJECT_STORE, ClientEnvironment, PreparedEnvironment
from tests.support.compose import read_file
from tests.support.console_world import Browser
from tests.support.live_server import LiveServer
from tests.support.polling import until
from tests.support.postgresql_server import PASSWORD
from tests.support.s3_server import SECRET_KEY, S3Server, s3_server, variables
from tests.support.with_constants import constants

pytestmark = pytest.mark.slow
FAKE = ("--base-model", "fake", "--backend", "fake")
SNAPSHOTS = constants("engine", snapshot_interval_requests=3, snapshot_max_share=1)
SLOWED = ("--backend-config.step-delay-s", "0.02", *SNAPSHOTS)
TENANTS = ("ann", "bob", "eve")
DISRUPTIONS = (("engine-1", signal.SIGKILL), ("engine-2", signal.SIGTERM), ("engine-1", signal.SIGTERM))
"""A kill and a rolling restart. Each disruption moves all runs to the other engine, which is ready."""
STEPS_A_PHASE = 3
_PATIENCE_S = 300.0
_LINE = re.compile(r"<tr><td>\d+</td><td>[^<]*, process (\d+)</td><td>(\w+).*?</tr>")
_RUN = re.compile(r'href="/training_runs/([^"]+)"')


def datum(*seed: int) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(1, 200, size=12)
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(11, dtype=np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def train(url: str, key: str, tenant: int, meet: Callable[[], object]) -> list[object]:
    """Train in phases, one for each disruption, and return all results.

    In each phase, tenants meet when each tenant has sent a pass and a step, continue, and meet
    again when they have saved. At the end, the saved state is loaded into another run, and the
    model is sampled.
    """
    seen: list[object] = []

    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        training = service.create_lora_training_client("fake", rank=8, seed=tenant).result()
        for phase in range(len(DISRUPTIONS)):
            for step in range(STEPS_A_PHASE):
                passed = training.forward_backward([datum(tenant, phase, step)], "cross_entropy")
                stepped = training.optim_step(types.AdamParams(learning_rate=0.05))
                if step == 0:
                    meet()
                stepped.result()
                seen.append(passed.result().metrics["loss:sum"])
            saved = training.save_state(f"phase-{phase}").result().path
            meet()

        copy = service.create_training_client_from_state_with_optimizer(saved).result()
        seen.append(copy.forward([datum(tenant)], "cross_entropy").result().metrics["loss:sum"])
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, seed=1)
        (sequence,) = sampler.sample(types.ModelInput.from_ints([7, 8, tenant]), 1, params).result().sequences
        seen += [sequence.tokens, sequence.logprobs]

    return seen


class Deployment:
    """An operator's processes, by the service names of the file."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._data_dir = directory / "data"  # a volume that all containers mount in the file
        self._environment = environment
        self._stack = ExitStack()
        self.engines: dict[str, LiveServer] = {}
        self.logs: list[LiveServer] = []

    def start(self, name: str) -> LiveServer:
        """Start a service of the file and wait until it is ready."""
        program, command, *flags = read_file("compose.engines.yaml")["services"][name]["entrypoint"]
        assert program == "skyrl-tx"
        own = [flag.replace("0.0.0.0", "127.0.0.1") for flag in flags]
        server = LiveServer(
            self._data_dir,
            command=command,
            flags=(*own, *FAKE, *(SLOWED if command == "engine" else ())),
            environment=self._environment,
            ready_within_s=_PATIENCE_S,
        )

        self._stack.callback(server.kill)
        self.logs.append(server)
        if command == "engine":
            self.engines[name] = server
        return server

    def cli(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        """Run a command of `skyrl-tx`, as the service `cli` does, and return its output."""
        assert main([*arguments, "--data-dir", str(self._data_dir)]) == 0
        return capsys.readouterr().out.strip()

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def read_holders(console: Browser) -> dict[int, set[str]]:
    """Return the runs of each running engine by its process id, as the console's health page shows them."""
    page = console.get("/health").text
    lines = {int(line[1]): line for line in _LINE.finditer(page) if line[2] == "ready"}
    return {pid: {html.unescape(run) for run in _RUN.findall(line[0])} for pid, line in lines.items()}


def has_holders(console: Browser, wanted: dict[int, set[str]]) -> bool:
    """Return whether the page shows exactly these engines with these runs."""
    return read_holders(console) == wanted


def has_engines(console: Browser, wanted: set[int]) -> bool:
    """Return whether the page shows exactly these engines."""
    return read_holders(console).keys() == wanted


@pytest.fixture(scope="module")
def store(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> Iterator[S3Server]:
    with s3_server(client_environment(OBJECT_STORE)) as server:
        server.create_bucket("skyrl-tx")
        yield server


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[list[object]]:
    """The results of undisturbed tenants on one engine, with SQLite and a local directory."""
    with LiveServer(tmp_path_factory.mktemp("calm"), flags=FAKE) as server:
        return [train(server.url, "tml-local", tenant, lambda: None) for tenant in range(len(TENANTS))]


@pytest.fixture
def environment(store: S3Server, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Set the file's variables with the addresses of this machine.

    Returns the complete environment.
    """
    given = read_file("compose.engines.yaml")["services"]["engine-1"]["environment"]
    given = {name: value for name, value in given.items() if value is not None and "$" not in value}
    ours = {**given, **variables(store.url), "SKYRL_TX_DATABASE_URL": postgresql_url}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **ours}


def test_tenants_notice_neither_a_killed_engine_nor_a_rolling_restart(
    tmp_path: Path, calm: list[list[object]], environment: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Deployment(tmp_path, environment) as site, ExitStack() as stack:
        keys = {name: site.cli(capsys, "keys", "create", name) for name in TENANTS}
        root = site.cli(capsys, "keys", "create", "--admin", "root")
        api, first, second = (site.start(name) for name in ("server", "engine-1", "engine-2"))
        console = Browser(stack.enter_context(httpx.Client(base_url=api.url, timeout=30))).log_in(root)
        until(partial(has_engines, console, {first.pid, second.pid}), _PATIENCE_S)
        meeting = threading.Barrier(len(TENANTS) + 1, timeout=_PATIENCE_S)
        clients = [
            in_background(_or_abort(meeting, partial(train, api.url, keys[name], tenant, meeting.wait)))
            for tenant, name in enumerate(TENANTS)
        ]
        held: list[dict[int, set[str]]] = []

        for victim, how in DISRUPTIONS:
            meeting.wait()
            held.append(read_holders(console))
            runs = set[str]().union(*held[-1].values())
            assert len(held[-1]) == 2 and len(runs) == len(TENANTS)
            other = next(engine for name, engine in site.engines.items() if name != victim)
            site.engines[victim].signal(how)
            assert site.engines[victim].wait(_PATIENCE_S) == (-how if how == signal.SIGKILL else 0)
            until(partial(has_holders, console, {other.pid: runs}), _PATIENCE_S)
            restarted = site.start(victim)
            # The runs are not compared, because the restarted engine may have received an idle run.
            until(partial(has_engines, console, {other.pid, restarted.pid}), _PATIENCE_S)
            meeting.wait()

        assert [client.result(_PATIENCE_S) for client in clients] == calm
        assert sorted(map(len, held[0].values())) == [1, 2], "runs are shared out by load"
        metrics = httpx.get(f"{api.url}/metrics", timeout=30).text
        assert all(f'engine="{number}"' in metrics for number in (1, 2)), (
            "both engines report metrics through the shared volume"
        )
        assert json.loads(site.cli(capsys, "status", "--here", "--json"))["failures"] == []

        for server in (*site.engines.values(), api):
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        for server in site.logs:
            assert "Traceback" not in server.log, server.log
            assert SECRET_KEY not in server.log and PASSWORD not in server.log
        assert not list((tmp_path / "data" / "artifacts").glob("art-*")), "weights are in the object store"


def _or_abort(meeting: threading.Barrier, work: Callable[[], list[object]]) -> Callable[[], list[object]]:
    """Abort the meeting if a client fails, so that no client waits for it."""

    def run() -> list[object]:
        try:
            return work()
        except BaseException:
            meeting.abort()
            raise

    return run
