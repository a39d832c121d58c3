"""A server with keys and rows of two owners, and browsers' requests to its console."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from skyrl_tx.store import keys
from skyrl_tx.store.tables import KeyScope
from tests.support.live_api import Server
from tests.support.live_stack import LiveStack, live_stack

TOKEN = re.compile(r'name="form_token" value="([0-9a-f]+)"')


@dataclass
class Browser:
    """One visitor: cookies, and the headers that a browser sends."""

    client: httpx.Client

    def get(self, path: str) -> httpx.Response:
        """Open an address by hand."""
        return self.client.get(path, headers={"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"})

    def token(self) -> str:
        """Return the token that the forms of this session carry."""
        found = TOKEN.search(self.get("/checkpoints").text)
        assert found is not None
        return found.group(1)

    def post(self, path: str, fields: dict[str, str | list[str]], **headers: str) -> httpx.Response:
        """Send a form from a page of the server."""
        own = {"Sec-Fetch-Site": "same-origin", "Origin": str(self.client.base_url).rstrip("/")}
        return self.client.post(path, data=fields, headers=own | {k.replace("_", "-"): v for k, v in headers.items()})

    def call(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Send JSON as a script of the playground's page does."""
        own = {"Sec-Fetch-Site": "same-origin", "Origin": str(self.client.base_url).rstrip("/")}
        if "X-Form-Token" not in headers:
            own["X-Form-Token"] = self.token()
        return self.client.post(path, json=body, headers=own | headers)

    def log_in(self, key: str) -> "Browser":
        """Log in with a key."""
        assert self.post("/login", {"key": key}).status_code == 303
        return self


@dataclass
class ConsoleWorld:
    """A live server over the fake backend."""

    stack: LiveStack

    @property
    def server(self) -> Server:
        """The server."""
        return self.stack.server

    def key(self, owner: str, scope: KeyScope = "user") -> str:
        """Make a key."""
        made, _ = self.server.store.write(
            lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=1.0)
        )
        return made

    @contextmanager
    def browser(self, key: str | None = None) -> Iterator[Browser]:
        """Open a browser, which logs in if a key is given."""
        with httpx.Client(base_url=self.server.url, timeout=30) as client:
            browser = Browser(client)
            yield browser if key is None else browser.log_in(key)


@contextmanager
def console_world(
    directory: Path, *, has_tokenizer: bool = False, token_delay_s: float = 0.0
) -> Iterator[ConsoleWorld]:
    """Serve until the context is left."""
    with live_stack(
        "fake", directory, failed_key_limit=0, has_tokenizer=has_tokenizer, token_delay_s=token_delay_s
    ) as stack:
        yield ConsoleWorld(stack)
