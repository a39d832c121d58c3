"""Which scopes of API keys allow which routes. Every route declares its scopes here.

Keys of scope `user` and `admin` may call every route, except that only `admin` may call the routes
in `ADMIN_ONLY`. The two scopes differ in which rows they see. Keys of all other scopes may call
only the routes that `_ADMITTED` lists for their scope.
"""

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Request

from skyrl_tx.server.errors import ApiError
from skyrl_tx.store.tables import KeyScope

API_PREFIX = "/api/v1"
FULL_SCOPES: frozenset[KeyScope] = frozenset({"admin", "user"})
_SAMPLE: frozenset[KeyScope] = frozenset({"sample"})
_READ: frozenset[KeyScope] = frozenset({"read"})
_CLIENT = _SAMPLE | _READ
_METRICS: frozenset[KeyScope] = frozenset({"metrics"})

_ADMIN: frozenset[KeyScope] = frozenset({"admin"})
ADMIN_ONLY = {f"{API_PREFIX}/audit": "GET audit"}
"""Routes that only admins may call: path to route name."""

_OTHER_PREFIXES = ("oai/api/v1", "v1", "anthropic/api/v1")
"""Prefixes of the OpenAI and Anthropic endpoints."""
_OPENAI = (
    *(("POST", "completions"), ("POST", "chat/completions")),
    *(("GET", "models"), ("GET", "models/{model_id:path}")),
)

_ADMITTED: Mapping[str, frozenset[KeyScope]] = {
    # Called by SDK clients before their first request
    "POST auth/token": _CLIENT,
    "GET auth/apikey/me": _CLIENT,
    "DELETE auth/apikey/me": _CLIENT,
    "POST client/config": _CLIENT,
    "POST client/dynamic_config": _CLIENT,
    "GET get_server_capabilities": _CLIENT,
    "POST telemetry": _CLIENT,
    # Sampling
    "POST create_session": _SAMPLE,
    "POST session_heartbeat": _SAMPLE,
    "POST sessions/{session_id}/finish": _SAMPLE,
    "POST create_sampling_session": _SAMPLE,
    "POST join_sampling_session": _SAMPLE,
    "POST asample": _SAMPLE,
    "POST retrieve_future": _SAMPLE,
    "POST retrieve_futures": _SAMPLE,
    "POST cancel_future": _SAMPLE,
    "GET samplers/{sampler_id}": _CLIENT,
    "POST weights_info": _CLIENT,
    **{f"{method} {prefix}/{path}": _SAMPLE for prefix in _OTHER_PREFIXES[:2] for method, path in _OPENAI},
    "POST anthropic/api/v1/messages": _SAMPLE,
    "POST anthropic/api/v1/messages/count_tokens": _SAMPLE,
    # Lists, descriptions and downloads
    "GET sessions": _READ,
    "POST sessions/search": _READ,
    "GET sessions/{session_id}": _READ,
    "GET sessions/{session_id}/trace_export": _READ,
    "POST get_info": _READ,
    "GET training_runs": _READ,
    "GET training_runs/{run_id}": _READ,
    "GET training_runs/{run_id}/checkpoints": _READ,
    "GET training_runs/{run_id}/metrics": _READ,
    "GET logged_runs": _READ,
    "GET logged_runs/{logged_run_id}/metrics": _READ,
    "GET checkpoints": _READ,
    "POST checkpoints/search": _READ,
    "POST search_checkpoints": _READ,
    "GET training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls": _READ,
    "GET training_runs/{run_id}/checkpoints/{kind}/{name}/archive": _READ,
    "GET billing/usage/events": _READ,
    "GET billing/usage/checkpoints/current": _READ,
    # Unknown paths: clients get a 404, which newer ones understand, instead of a 403
    **{
        f"{method} {prefix}{{path:path}}": _CLIENT
        for prefix in ("", *(f"{prefix}/" for prefix in _OTHER_PREFIXES))
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH")
    },
    # Monitoring; `healthz` and `livez` need no key
    "GET metrics": _METRICS,
}


def get_scopes(route: str) -> frozenset[KeyScope]:
    """Return the scopes that may call a route, for example "GET training_runs/{run_id}"."""
    return _ADMIN if route in ADMIN_ONLY.values() else FULL_SCOPES | _ADMITTED.get(route, frozenset())


def check_scope(scope: KeyScope, request: Request) -> None:
    """Raise ApiError 403 if a scope does not allow the route of a request.

    Clients do not retry a 403.
    """
    # Name the route. The long poll has no route, because it is served before routing.
    route = request.scope.get("route")
    path: str = request.scope["path"] if route is None else route.path
    prefix = next((prefix for prefix in _OTHER_PREFIXES if request.scope["path"].startswith(f"/{prefix}/")), "")
    rest = path.removeprefix(API_PREFIX).lstrip("/").removeprefix(prefix).lstrip("/")  # FastAPI may omit the prefix
    name = f"{request.method} {prefix}/{rest}" if prefix else f"{request.method} {rest}"

    admitted = get_scopes(name)
    if scope not in admitted:
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"X-API-Key: a key of scope {scope} does not allow {name}; it needs scope {' or '.join(sorted(admitted))}",
            reason="scope",
        )
