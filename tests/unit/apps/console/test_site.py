"""How the console shares its threads among visitors."""

import asyncio
import threading
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from skyrl_tx.apps.console.login import ConsoleSessions
from skyrl_tx.apps.console.site import Console, Form
from skyrl_tx.server.app import create_context
from skyrl_tx.server.identity.authentication import Authenticator, Principal, SigningKey
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store.database import Store


def make_request(address: str, cookie: str = "") -> Request:
    headers = [(b"host", b"localhost"), (b"cookie", cookie.encode())]
    scope = {"type": "http", "method": "GET", "path": "/overview", "scheme": "http", "client": (address, 1)}
    return Request({**scope, "query_string": b"", "headers": headers})


def test_a_visitor_is_named_by_key_or_by_network(store: Store, tmp_path: Path) -> None:
    signing_key = SigningKey(b"k" * 32)
    settings = ApiSettings(data_dir=tmp_path, base_model="fake")
    visitors = ConsoleSessions(Authenticator(settings, store, signing_key), store, signing_key)

    cookies: list[str] = []
    for _ in range(2):
        response = Response()
        visitors.set_cookie(make_request("10.0.0.1"), response, Principal("ann", key_id=7))
        cookies.append(response.headers["set-cookie"].partition(";")[0])
    assert cookies[0] != cookies[1]

    names = [visitors.name_visitor(make_request(f"10.0.0.{number}", cookie)) for number, cookie in enumerate(cookies)]
    assert names == ["key 7", "key 7"], "logging in again gives no second share"
    assert visitors.name_visitor(make_request("10.0.0.1", f"{cookies[0]}x")) == "10.0.0.1", "a forged cookie"
    assert visitors.name_visitor(make_request("2001:db8::1")) == visitors.name_visitor(make_request("2001:db8::2"))


def test_a_visitor_with_many_requests_leaves_threads_for_others(store: Store, tmp_path: Path) -> None:
    console = Console(create_context(ApiSettings(data_dir=tmp_path, base_model="fake"), store))
    serve = console._serve  # pyright: ignore[reportPrivateUsage]
    may_end = threading.Event()

    def work(_: Form) -> Response:
        may_end.wait(30)
        return Response()

    async def test() -> None:
        slow = [asyncio.create_task(serve(make_request("10.0.0.1"), work)) for _ in range(12)]
        await asyncio.sleep(0)
        other = await asyncio.wait_for(serve(make_request("10.0.0.2"), lambda _: Response("page")), 30)
        assert other.body == b"page" and not any(task.done() for task in slow)
        may_end.set()
        await asyncio.gather(*slow)

    asyncio.run(test())
