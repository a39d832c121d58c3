import gc
from collections.abc import Iterator

import pytest
import tinker

from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.testing.live_api import Server, live_api
from skyrl_tx.testing.live_house import House, live_house
from skyrl_tx.testing.scripted_engine import ScriptedEngine, scripted_engine


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


@pytest.fixture(scope="session", params=["fake", "jax"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """API and engine over each backend in turn."""
    with live_house(request.param, tmp_path_factory.mktemp("house")) as house:
        yield house
    gc.collect()  # what the SDK leaves is collected here, where the warnings about it are ignored


@pytest.fixture
def service(house: House) -> Iterator[tinker.ServiceClient]:
    """A client of a house; a test may bring its own."""
    with tinker.ServiceClient(base_url=house.url, user_metadata={"a": "b"}) as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("Qwen/Qwen3-8B", rank=8, seed=1).result()
