"""The API on a real socket, for tests and benchmarks."""

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import httpx
from starlette.types import ASGIApp

from skyrl_tx.compose import APPS
from skyrl_tx.contract import codec, requests
from skyrl_tx.launch.command import App, load_server_extensions
from skyrl_tx.models import adapter_import
from skyrl_tx.server.app import ApiServer
from skyrl_tx.server.routes import uploads
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import futures
from skyrl_tx.store.database import Store


@dataclass
class Server:
    """A listening server, its store, and a client for it."""

    url: str
    settings: ApiSettings
    store: Store
    client: httpx.Client
    api: ApiServer

    def post(self, endpoint: str, /, **body: object) -> httpx.Response:
        """Call an endpoint with JSON."""
        return self.client.post(f"/api/v1/{endpoint}", json=body)

    def session(self) -> str:
        """Create a session."""
        return self.post("create_session", tags=[], sdk_version="0.38.0").json()["session_id"]

    def model(self, session_id: str | None = None, model_seq_id: int = 0) -> str:
        """Submit a create_model without waiting for its result."""
        answer = self.post(
            "create_model",
            session_id=session_id or self.session(),
            model_seq_id=model_seq_id,
            base_model=self.settings.public_model_name,
            lora_config={"rank": 8},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["model_id"]

    def result(self, answer: httpx.Response) -> dict[str, object]:
        """Wait for the result of an acknowledged request; return its JSON."""
        assert answer.status_code == 200, answer.text
        while True:
            got = self.post("retrieve_future", request_id=answer.json()["request_id"])
            if got.status_code != 408:
                assert got.status_code == 200, got.text
                return got.json()

    def read_request(self, request_id: str) -> requests.Request:
        """Return the stored request, as the engine reads it."""
        pending = self.store.read(lambda tx: futures.list_pending(tx, 0, 10_000))
        body = next(request.body for request in pending if request.request_id == request_id)
        request = codec.decode(body)
        assert isinstance(request, requests.Request)
        return request


@contextmanager
def adapters_in_process() -> Generator[None]:
    """Read uploaded adapters in this process, because a child process takes a second to import JAX."""

    def call_child(request: str) -> str:
        return json.dumps(adapter_import.answer(json.loads(request)))

    with patch.object(uploads, "call_child", call_child):
        yield


@contextmanager
def live_api(
    settings: ApiSettings, wrap: Callable[[ASGIApp], ASGIApp] | None = None, apps: Sequence[App] = APPS
) -> Generator[Server]:
    """Serve on a thread with the store in `settings.data_dir`; `wrap` may record or disturb the calls."""
    store = Store.open(settings.data_dir, role="api", url=settings.store_url)
    api = ApiServer(settings, store, load_server_extensions(apps))
    if wrap is not None:
        api.config.app = wrap(api.app)
    thread = threading.Thread(target=api.run)
    thread.start()

    try:
        while not api.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        url = f"{settings.scheme}://127.0.0.1:{api.servers[0].sockets[0].getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=30) as client:
            yield Server(url=url, settings=settings, store=store, client=client, api=api)
    finally:
        api.should_exit = True
        thread.join()
        store.close()
