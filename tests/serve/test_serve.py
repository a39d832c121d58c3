"""`skyrl-tx serve` as a command with two processes, signals and the real SDK."""

import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx import __version__
from tests.support.database_rows import rows
from tests.support.live_server import LiveServer, ServerFailed
from tests.support.polling import until

FAKE = ("--base-model", "fake", "--backend", "fake")
ENGINE_STARTED = re.compile(r"engine process (\d+)")
NUM_STEPS = 12


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path / "data", flags=FAKE) as server:
        yield server


@dataclass(frozen=True)
class SharedServer:
    """A server for tests that do not stop it."""

    server: LiveServer
    data_dir: Path


@pytest.fixture(scope="module")
def common_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    data_dir = tmp_path_factory.mktemp("shared") / "data"
    with LiveServer(data_dir, flags=FAKE) as server:
        yield SharedServer(server, data_dir)


def create_training_client(url: str) -> tinker.TrainingClient:
    return tinker.ServiceClient(base_url=url).create_lora_training_client("fake", rank=8, seed=1).result()


def datum(seed: int) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(1, 200, size=12)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(11, dtype=np.float32)},
    )


def train(training: tinker.TrainingClient, steps: range) -> Iterator[float]:
    """Yield the loss of each step of supervised training."""
    for step in steps:
        passed = training.forward_backward([datum(step % 3), datum(step % 5)], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.05))
        yield passed.result().metrics["loss:sum"]
        stepped.result()


@pytest.fixture(scope="module")
def calm_losses(common_server: SharedServer) -> list[float]:
    """The losses of an undisturbed run."""
    losses = list(train(create_training_client(common_server.server.url), range(NUM_STEPS)))
    assert losses[-1] < losses[0]
    return losses


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_train_sample_stop(server: LiveServer, tmp_path: Path) -> None:
    training = create_training_client(server.url)
    losses = list(train(training, range(4)))
    assert np.isfinite(losses).all()

    sampling = training.save_weights_and_get_sampling_client().result()
    sampled = sampling.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=3)).result()
    assert len(sampled.sequences[0].tokens) == 3
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    engine = server.engine_pid
    assert server.stop() == 0
    assert is_gone(engine)
    assert "engine stopped cleanly" in server.log
    assert "ERROR" not in server.log and "Traceback" not in server.log


def test_log_starts_with_the_model_and_the_url(common_server: SharedServer) -> None:
    server = common_server.server
    server.wait_for(re.compile(r"(tinker\.ServiceClient)"))
    for output in (
        f"skyrl_tx {__version__}",
        "devices: fake",
        "model: fake, 65,536 parameters",
        str(common_server.data_dir),
    ):
        assert output in server.log

    code = "\n".join(line.split(" serve ")[1].strip() for line in server.log.splitlines() if "tinker" in line)
    names: dict[str, tinker.ServiceClient] = {}
    exec(code, names)
    assert names["service"].create_lora_training_client("fake", rank=8).result().model_id


@pytest.mark.slow
def test_runs_and_checkpoints_outlive_the_server(tmp_path: Path, calm_losses: list[float]) -> None:
    """The run continues bit-equal with the client that started it, and checkpoints keep their expiry."""
    half = NUM_STEPS // 2

    with LiveServer(tmp_path, flags=FAKE) as server:
        training = create_training_client(server.url)
        losses = list(train(training, range(half)))
        path = training.save_state("ends", ttl_seconds=7200).result().path
        training.save_state("stays").result()
        before = {
            checkpoint.tinker_path: checkpoint.expires_at
            for checkpoint in list_checkpoints(server.url, training.model_id)
        }
        port = int(server.url.rsplit(":", 1)[1])
        assert server.stop() == 0

    with LiveServer(tmp_path, port=port, flags=FAKE) as server:
        after = {
            checkpoint.tinker_path: checkpoint.expires_at
            for checkpoint in list_checkpoints(server.url, training.model_id)
        }
        assert after == before and after[path] is not None and list(after.values()).count(None) == 1
        service = tinker.ServiceClient(base_url=server.url)
        assert service.create_training_client_from_state(path).result().model_id
        losses += train(training, range(half, NUM_STEPS))
    assert losses == calm_losses


def list_checkpoints(url: str, model_id: str) -> list[types.Checkpoint]:
    rest = tinker.RestClient(base_url=url)
    return rest.list_checkpoints(model_id).result().checkpoints


def test_run_continues_bit_equal_after_an_engine_kill(common_server: SharedServer, calm_losses: list[float]) -> None:
    server = common_server.server
    losses: list[float] = []
    for loss in train(create_training_client(server.url), range(NUM_STEPS)):
        losses.append(loss)
        if len(losses) == NUM_STEPS // 2:
            os.kill(server.engine_pid, signal.SIGKILL)
    server.wait_for(ENGINE_STARTED, times=2)
    assert losses == calm_losses
    assert server.log.count("connect with") == 1 and f"console: {server.url}/overview\n" in server.log
    assert re.search(r"data: \S+, (empty|runs: [\d,]+, checkpoints: [\d,]+)\n", server.log)


def test_engine_exits_with_its_parent(server: LiveServer) -> None:
    engine = server.engine_pid
    server.signal(signal.SIGKILL)
    until(lambda: is_gone(engine))


def test_second_signal_exits_at_once(tmp_path: Path) -> None:
    slow = (*FAKE, "--backend-config.step-delay-s", "300")
    with LiveServer(tmp_path, flags=slow) as server:
        create_training_client(server.url).forward([datum(0)], "cross_entropy")
        until(lambda: rows(tmp_path, None, "SELECT 1 FROM requests WHERE attempts > 0"))  # the engine has started it
        server.signal(signal.SIGINT)
        server.wait_for(re.compile("(stopping)"))
        server.signal(signal.SIGTERM)
        assert server.wait(60.0) == 128 + signal.SIGTERM
        until(lambda: is_gone(server.engine_pid))


def test_second_server_names_the_resource_in_use(common_server: SharedServer, tmp_path: Path) -> None:
    port = common_server.server.url.rsplit(":", 1)[1]
    for data_dir, second_port, output in (
        (common_server.data_dir, "0", str(common_server.data_dir)),
        (tmp_path / "other", port, f"127.0.0.1:{port}"),
    ):
        command = [sys.executable, "-m", "skyrl_tx", "serve", *FAKE, "--data-dir", str(data_dir), "--port", second_port]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert output in second.stderr
        assert len(second.stderr.splitlines()) == 1


@pytest.fixture
def third_backend(tmp_path: Path) -> Path:
    """Install a third-party backend, as its own distribution, into a directory."""
    package = tmp_path / "site" / "counting_backend"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        textwrap.dedent('''
            """A third-party backend."""
            from pydantic import BaseModel, ConfigDict, Field
            from skyrl_tx.contract.backend import BackendSpec

            class CountingConfig(BaseModel):
                model_config = ConfigDict(extra="forbid")
                first_token: int = Field(1, description="where to begin")

            def _load():
                from counting_backend.backend import CountingBackend
                return CountingBackend

            BACKEND = BackendSpec(config=CountingConfig, load=_load)
        ''')
    )
    (package / "backend.py").write_text(
        textwrap.dedent("""
            from dataclasses import replace
            from skyrl_tx.testing.fake.backend import FakeBackend
            from skyrl_tx.testing.fake import FakeConfig
            from skyrl_tx.contract.errors import UserError

            class CountingBackend(FakeBackend):
                def __init__(self, base_model, config):
                    super().__init__(base_model, FakeConfig())
                    self._model, self._config_of_ours = base_model, config

                def start(self):
                    if self._model == "nowhere":
                        raise UserError("base_model 'nowhere': no such directory")
                    return replace(super().start(), devices=(f"abacus {self._config_of_ours.first_token}",))
        """)
    )
    information = tmp_path / "site" / "counting_backend-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-backend\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[skyrl_tx.backends]\ncounting = counting_backend:BACKEND\n")
    return tmp_path / "site"


def test_backend_of_another_distribution_serves(tmp_path: Path, third_backend: Path) -> None:
    flags = ("--base-model", "fake", "--backend", "counting", "--backend-config.first-token", "7")
    environment = os.environ | {"PYTHONPATH": str(third_backend)}
    with LiveServer(tmp_path / "data", flags=flags, environment=environment) as server:
        assert "devices: abacus 7" in server.log
        assert len(list(train(create_training_client(server.url), range(2)))) == 2


def test_model_load_error_is_reported_once(tmp_path: Path, third_backend: Path) -> None:
    flags = ("--base-model", "nowhere", "--backend", "counting")
    environment = os.environ | {"PYTHONPATH": str(third_backend)}
    with pytest.raises(ServerFailed) as failure:
        LiveServer(tmp_path / "data", flags=flags, environment=environment)
    log = str(failure.value)
    assert log.count("base_model 'nowhere': no such directory") == 1
    assert len(ENGINE_STARTED.findall(log)) == 1
    assert "Traceback" not in log


@pytest.mark.slow
def test_jax_backend_serves_the_built_in_model(tmp_path: Path) -> None:
    with LiveServer(tmp_path / "data", flags=("--base-model", "tiny")) as server:
        service = tinker.ServiceClient(base_url=server.url)
        training = service.create_lora_training_client("tiny", rank=8).result()
        tokenizer = training.get_tokenizer()
        tokens = tokenizer.encode("1 + 1 = 2")

        example = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": np.array(tokens[1:], dtype=np.int64),
                "weights": np.ones(len(tokens) - 1, dtype=np.float32),
            },
        )

        losses = []
        for _ in range(3):
            passed = training.forward_backward([example], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.01))
            losses.append(passed.result().metrics["loss:sum"])
        assert losses[2] < losses[0]
