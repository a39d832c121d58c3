import gc
from collections.abc import Iterator

import pytest
import tinker

from skyrl_tx.server.settings import ApiSettings
from tests.support.live_api import Server, live_api
from tests.support.live_stack import LiveStack, live_stack
from tests.support.scripted_engine import ScriptedEngine, scripted_engine


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ApiSettings:
    return ApiSettings(
        port=0,
        data_dir=tmp_path_factory.mktemp("data"),
        base_model="Qwen/Qwen3-8B",
        max_request_bytes=4 * 2**20,
        retrieve_hold_s=0.5,
    )


@pytest.fixture(scope="module")
def server(settings: ApiSettings) -> Iterator[Server]:
    with live_api(settings) as server:
        yield server


@pytest.fixture(scope="module")
def engine(server: Server, settings: ApiSettings) -> Iterator[ScriptedEngine]:
    with scripted_engine(settings.data_dir) as engine:
        yield engine


@pytest.fixture(scope="package", params=["fake", pytest.param("jax", marks=pytest.mark.slow)])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """An API process and an engine with the fake backend. Slow tests also use the JAX backend.

    A test that depends on the backend has the mark `both_backends` and always runs on both.
    """
    with live_stack(request.param, tmp_path_factory.mktemp("stack")) as stack:
        yield stack
    gc.collect()  # collect the SDK's unclosed objects here, where their warnings are ignored


@pytest.fixture
def service(stack: LiveStack) -> Iterator[tinker.ServiceClient]:
    """A client that is connected to the stack."""
    with tinker.ServiceClient(base_url=stack.url, user_metadata={"a": "b"}) as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("Qwen/Qwen3-8B", rank=8, seed=1).result()
