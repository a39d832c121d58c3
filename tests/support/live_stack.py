"""API and engine with any backend in one process, with a record of all calls."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import pytest
from pydantic import SecretStr

from skyrl_tx.apps.teams.prices import Prices, TeamsSettings
from skyrl_tx.backends.jax import BACKEND as JAX
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.live_api import Server, live_api
from tests.support.live_engine import live_engine
from tests.support.recording_middleware import RecordingMiddleware
from tests.support.tiny_tokenizer import PACKAGED

PUBLIC_NAME = "Qwen/Qwen3-8B"
VOCAB_SIZE = 1024
CONTEXT = 128  # tokens
MAX_RANK = 16

both_backends = pytest.mark.parametrize("stack", ["fake", "jax"], indirect=True, scope="package")
"""Mark for tests in `tests/api` that run with JAX by default. With JAX, all other tests are slow tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStack:
    """A server with the model name `PUBLIC_NAME` and the sizes above, for any backend."""

    server: Server
    backend: AbstractBackend
    recorder: RecordingMiddleware

    @property
    def url(self) -> str:
        """The URL of the server."""
        return self.server.url


def small_backend(
    name: str, directory: Path, token_delay_s: float = 0.0, *, constrains: bool = False
) -> tuple[str, AbstractBackend]:
    """Create a backend with the sizes above; return its base model and the backend.

    With `token_delay_s` the fake backend samples one token per step, after that delay. With
    `constrains` it has the tokenizer of the tiny model, which samples with a constraint need.
    """
    if name == "fake":
        sizes = {"vocab_size": VOCAB_SIZE, "max_context_length": CONTEXT, "max_lora_rank": MAX_RANK}
        config = FakeConfig(**sizes, tokenizer_file=PACKAGED / "tokenizer.json" if constrains else None)
        if token_delay_s:
            config = config.model_copy(update={"slice_tokens": 1, "step_delay_s": token_delay_s})
        return "fake", FakeBackend("fake", config)
    model = str(write_tiny_model(directory / "model"))
    settings = JaxConfig(
        compile_cache_dir=None,
        max_context_length=CONTEXT,
        max_lora_adapters=4,
        max_lora_rank=MAX_RANK,
        max_sampler_adapters=4,
        micro_batch_tokens=CONTEXT,
        sample_slots=8,
        max_sample_tokens=2048,
        prefill_tokens=128,
    )
    return model, JAX.load()(model, settings)


@contextmanager
def live_stack(
    backend_name: str,
    directory: Path,
    *,
    large_result_bytes: int = 2**20,
    token_delay_s: float = 0.0,
    retrieve_hold_s: float = 30.0,
    failed_key_limit: int = 20,
    has_tokenizer: bool = False,
    constrains: bool = False,
    max_streams: int = 64,
    tool_parser: Literal["auto", "harmony", "hermes", "none"] = "auto",
    prices: Prices | None = None,
    artifacts: str | None = None,
    database_url: str | None = None,
) -> Generator[LiveStack]:
    """Serve with a small backend, until the context is left.

    `has_tokenizer`: with the fake backend, the API has the tokenizer of the tiny model.
    `constrains`: the fake backend has it too, so that it can constrain samples.
    """
    base_model, backend = small_backend(backend_name, directory, token_delay_s, constrains=constrains)
    data_dir, recorder = directory / "data", RecordingMiddleware()
    data_dir.mkdir(mode=0o700)
    tokenizer = str(write_tiny_model(directory / "tokenizer")) if has_tokenizer and backend_name == "fake" else None
    api = ApiSettings(
        tokenizer_id=tokenizer,
        max_streams=max_streams,
        tool_parser=tool_parser,
        port=0,
        data_dir=data_dir,
        base_model=base_model,
        served_model_name=PUBLIC_NAME,
        large_result_bytes=large_result_bytes,
        retrieve_hold_s=retrieve_hold_s,
        failed_key_limit=failed_key_limit,
        apps=(TeamsSettings(prices=prices or Prices()),),
        artifacts=artifacts,
        database_url=None if database_url is None else SecretStr(database_url),
    )
    engine = EngineSettings(
        data_dir=data_dir,
        base_model=base_model,
        served_model_name=PUBLIC_NAME,
        artifacts=artifacts,
        database_url=api.database_url,
    )
    with live_api(api, recorder.wrap) as server, live_engine(engine, backend):
        _wait_until_ready(server)
        yield LiveStack(server=server, backend=backend, recorder=recorder)


@contextmanager
def live_model(model: Path, name: str, data_dir: Path) -> Generator[str]:
    """Serve a tiny model from its directory in float32, under a name, until the context is left; give the URL."""
    config = JaxConfig(
        compile_cache_dir=None,
        dtype="float32",
        max_context_length=64,
        max_lora_rank=MAX_RANK,
        micro_batch_tokens=256,
        sample_slots=4,
        max_sample_tokens=512,
        prefill_tokens=64,
    )
    api = ApiSettings(port=0, data_dir=data_dir, base_model=str(model), served_model_name=name)
    engine = EngineSettings(data_dir=data_dir, base_model=str(model), served_model_name=name)
    with live_api(api) as server, live_engine(engine, JAX.load()(str(model), config)):
        _wait_until_ready(server)
        yield server.url


def _wait_until_ready(server: Server, within_s: float = 300.0) -> None:
    end = time.monotonic() + within_s
    while (answer := server.client.get("/api/v1/healthz")).status_code != HTTPStatus.OK:
        assert time.monotonic() < end, answer.text
        time.sleep(0.02)
