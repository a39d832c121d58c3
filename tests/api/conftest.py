from collections.abc import Iterator

import pytest

from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.testing.live_api import Server, live_api
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
