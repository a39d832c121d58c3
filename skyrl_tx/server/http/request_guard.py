"""Checks host, origin and proxy headers of every request, and counts all responses.

As long as no API key is required, everyone who can send a request is an admin. Web pages that the
user happens to visit can send requests to loopback, by DNS rebinding or cross-site requests. They
must not be admins, and the clients of a reverse proxy must not be admins either. `RequestGuard` is
the outermost middleware.
"""

import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache, lru_cache, partial
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

from fastapi.concurrency import run_in_threadpool
from prometheus_client import Counter, Histogram
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from skyrl_tx.server.errors import ApiError, bad_request
from skyrl_tx.server.http.connections import ThrottledWarning, normalize_address
from skyrl_tx.server.identity.scopes import API_PREFIX
from skyrl_tx.server.settings import ApiSettings

_log = logging.getLogger(__name__)
_PATHS: Mapping[str, tuple[str, ...]] = {
    "poll": ("retrieve_future", "retrieve_futures"),
    "train": ("forward", "forward_backward", "optim_step"),
    "sample": ("asample", "create_sampling_session", "join_sampling_session", "cancel_future"),
    "weights": ("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "copy_weights"),
    "session": (
        "create_session",
        "session_heartbeat",
        "create_model",
        "unload_model",
        "auth/token",
        "telemetry",
        "create_custom_loss",
    ),
}
"""The paths of each group of routes, without the prefix of the API."""
_FIRST_PARTS: Mapping[str, str] = {
    "api": "manage",
    "metrics": "metrics",
    **dict.fromkeys(("oai", "v1", "anthropic"), "chat"),
}
"""The groups of other paths by their first part.

All remaining paths, such as pages and unknown paths, belong to the group `other`.
"""

_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"})
_CHECKED = _FORWARDED | {b"host", b"origin", b"sec-fetch-site"}
_OWN_PAGE_SITES = frozenset({b"same-origin", b"none"})
"""Values of Sec-Fetch-Site for requests of the console. `none`: the user typed the address.

Source: W3C, Fetch Metadata Request Headers.
"""
UNTRUSTED = "skyrl_tx.untrusted"
"""Key in the ASGI scope of a request that may come from another web page or through a proxy.

Only set on servers that require keys: other servers refuse such a request.
"""
_CREATE_KEYS = "create API keys with `skyrl-tx keys create`"


class TrustedProxies:
    """The addresses and networks of reverse proxies whose forwarding headers are trusted."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]
        self._cached = lru_cache(maxsize=4096)(self._is_trusted)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def __contains__(self, address: str) -> bool:
        return self._cached(address)

    def _is_trusted(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:  # in tests the client has a name
            return False
        return any(parsed in network for network in self._networks)


class KnownHosts:
    """The host names that clients may use for this server.

    A page of another site can make its own host name resolve to this server (DNS rebinding). It
    cannot do that with an IP address or with the name of this machine.
    """

    def __init__(self, settings: ApiSettings) -> None:
        named = [settings.host, socket.gethostname(), urlsplit(settings.public_url or "").hostname or ""]
        self._names = {name.lower().rstrip(".") for name in ("localhost", *named, *settings.allowed_hosts)}
        self._cached = lru_cache(maxsize=4096)(self._is_known)

    def __contains__(self, host: bytes) -> bool:
        return len(host) <= 300 and self._cached(host)

    def _is_known(self, host: bytes) -> bool:
        try:
            name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
        except ValueError:
            return False
        name = name.rstrip(".")
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return not host  # sent by HTTP/1.0 clients, never by a browser
        return True


class HttpGroup:
    """The metrics of one group of routes."""

    def __init__(self, name: str, requests: Counter, seconds: Histogram) -> None:
        # Look up the labels only once, because the look-up takes longer than counting.
        self.observe_seconds: Callable[[float], None] = seconds.labels(name).observe
        self.get_counter = cache(partial(requests.labels, name))


class HttpGroups:
    """Maps each path to its group.

    Paths are not used as labels, because clients can make up any number.
    """

    def __init__(self, requests: Counter, seconds: Histogram) -> None:
        names = dict.fromkeys([*_PATHS, *_FIRST_PARTS.values(), "other"])
        groups = {name: HttpGroup(name, requests, seconds) for name in names}
        self._by_path = {f"{API_PREFIX}/{path}": groups[name] for name, paths in _PATHS.items() for path in paths}
        self._by_first_part = {part: groups[name] for part, name in _FIRST_PARTS.items()}
        self._other = groups["other"]

    def find(self, path: str) -> HttpGroup:
        """Return the group of a path."""
        return self._by_path.get(path) or self._by_first_part.get(path[1:].partition("/")[0], self._other)


class RequestGuard:
    """ASGI middleware that protects servers without API keys.

    It refuses (403) suspicious requests that would have an admin's rights only because no key is
    required.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ApiSettings,
        requires_key: Callable[[], bool],
        handle_error: Callable[[Request, Exception], Awaitable[Response]],
        groups: HttpGroups,
    ) -> None:
        """`requires_key()` returns whether API keys are required now. It may read the database."""
        self._app = app
        self._proxied = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, app), settings.trusted_proxies))
        self._proxies = TrustedProxies(settings.trusted_proxies)
        self._hosts = KnownHosts(settings)
        self._always_checks_host = bool(settings.allowed_hosts)
        self._requires_key = requires_key
        self._handle_error = handle_error
        self._groups = groups
        self._warn = ThrottledWarning(_log)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one ASGI connection.

        This is not a coroutine function, because each of thousands of long polls would keep another
        coroutine in memory.
        """
        if scope["type"] != "http":
            return self._app(scope, receive, send)

        send = _wrap_send(self._groups, scope["path"], send)

        # Let uvicorn's middleware read the headers of a trusted proxy.
        app, is_proxied = self._app, False
        if self._proxies and (client := scope.get("client")):
            address = normalize_address(client[0])
            if address in self._proxies:
                scope["client"] = address, client[1]
                app, is_proxied = self._proxied, True

        # No database can store a zero character.
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            where = "path" if "\0" in scope["path"] else "query"
            return self._refuse(bad_request(f"{where}: must not contain %00 (U+0000)"), scope, receive, send)

        problem = self._find_problem(scope, is_proxied=is_proxied)
        if problem is None:
            return app(scope, receive, send)
        return self._refuse_without_keys(problem, app, scope, receive, send)

    def _find_problem(self, scope: Scope, *, is_proxied: bool) -> str | None:
        """Return why a request must not get admin rights without a key. None for usual requests."""
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        checked = [header for header in headers if header[0] in _CHECKED]
        if len(checked) == 1 and checked[0][0] == b"host" and checked[0][1] in self._hosts:
            return None

        values = dict(checked)
        forwarded = _FORWARDED & values.keys()
        origin = values.get(b"origin", b"")
        site = values.get(b"sec-fetch-site", b"none")

        # A reverse proxy that is not configured as trusted.
        if forwarded and not is_proxied:
            return (
                f"{min(forwarded).decode()}: the request came through a proxy, whose users would all be admins. "
                f"Please {_CREATE_KEYS}, or if the proxy authenticates its users, name it with --trusted-proxies"
            )

        # DNS rebinding.
        for name, value in checked:
            if name == b"host" and value not in self._hosts:
                return _describe_unknown_host(value)

        # A cross-site request.
        if site not in _OWN_PAGE_SITES and not _is_page_navigation(scope):
            return f"Sec-Fetch-Site {_quote_header(site)}: a web page of another site sent this request; {_CREATE_KEYS}"
        if origin and origin.partition(b"://")[2].lower() != values.get(b"host", b"").lower():
            return f"Origin {_quote_header(origin)}: a web page of another site sent this request; {_CREATE_KEYS}"
        return None

    async def _refuse_without_keys(
        self, problem: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request = Request(scope)
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        has_unknown_host = self._always_checks_host and not all(host in self._hosts for host in hosts)
        try:
            if has_unknown_host or not await run_in_threadpool(self._requires_key):
                raise ApiError(HTTPStatus.FORBIDDEN, problem)
        except Exception as error:
            if isinstance(error, ApiError):
                self._warn(f"refused {request.method} {request.url.path[:100]}: {error.detail}")
            await self._refuse(error, scope, receive, send)
        else:
            scope[UNTRUSTED] = problem
            await app(scope, receive, send)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handle_error(Request(scope), error)
        await response(scope, receive, send)


def _wrap_send(groups: HttpGroups, path: str, send: Send) -> Send:
    """Return a `send` that counts the response and measures its time."""
    group = groups.find(path)
    started = time.monotonic()

    async def send_and_count(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.start":
            group.get_counter(str(message["status"])).inc()
        elif not message.get("more_body"):
            group.observe_seconds(time.monotonic() - started)

    return send_and_count


def _is_page_navigation(scope: Scope) -> bool:
    """Return whether the user follows a link to a page of the console.

    This is harmless: the site with the link cannot read the page, and no GET request changes
    anything (W3C, Fetch Metadata Request Headers).
    """
    headers = dict(scope["headers"])
    is_page = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    return is_page and scope["method"] == "GET" and not scope["path"].startswith(API_PREFIX + "/")


def _quote_header(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


def _describe_unknown_host(host: bytes) -> str:
    return (
        f"Host {_quote_header(host)}: not a name of this server. Add it with --allowed-hosts if clients use it; "
        f"without API keys only localhost, IP addresses and the name of this machine are accepted ({_CREATE_KEYS})"
    )
