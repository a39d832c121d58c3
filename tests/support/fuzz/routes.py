"""Fuzz calls of every route of the OpenAPI document: valid, nearly valid and malformed bodies and queries."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpx
from hypothesis import strategies as st
from pydantic import BaseModel

from skyrl_tx.server.schemas.base import WireModel
from tests.support.fuzz.reports import HANG_S, Finding, Hang, ServerError, Tally
from tests.support.live_api import Server

Json = dict[str, Any]
INTEGERS = st.one_of(st.integers(-1, 5), st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400]))
FLOATS = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, math.nan, math.inf, 1e308]))
WILD = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
DEEP = st.integers(50, 900).map(lambda depth: json.loads("[" * depth + "]" * depth))


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path with parameters, from the OpenAPI document."""

    method: str
    path: str
    query: tuple[tuple[str, Json], ...]
    """Query parameters by name, with their JSON schemas."""


def list_routes(server: Server) -> list[Route]:
    """Return all routes of the server."""
    paths: dict[str, dict[str, Json]] = server.api.app.openapi()["paths"]
    return [
        Route(
            method.upper(),
            path,
            tuple(
                (parameter["name"], parameter["schema"])
                for parameter in found.get("parameters", ())
                if parameter["in"] == "query"
            ),
        )
        for path, methods in paths.items()
        for method, found in methods.items()
    ]


def create_ids(server: Server) -> dict[str, str]:
    """Create resources and return their ids by field name; calls may delete them, so each use needs new ones."""
    base_model = server.settings.public_model_name
    session_id = server.session()
    model_id = server.model(session_id)
    sampler = server.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=base_model
    ).json()["sampling_session_id"]
    saved = server.post("save_weights", model_id=model_id, path="a", seq_id=1)
    return {
        "session_id": session_id,
        "model_id": model_id,
        "run_id": model_id,
        "sampling_session_id": sampler,
        "request_id": saved.json()["request_id"],
        "base_model": base_model,
        "model": base_model,
        "path": f"tinker://{model_id}/weights/a",
        "model_path": f"tinker://{model_id}/sampler_weights/a",
        "kind": "weights",
        "name": "a",
    }


def schemas(kind: type[BaseModel] = WireModel) -> list[type[BaseModel]]:
    """Return the schemas of all objects that clients send."""
    return [schema for child in kind.__subclasses__() for schema in (child, *schemas(child))]


def find_schemas(path: str) -> list[type[BaseModel]]:
    """Return the schema named like the route, or all schemas if there is none."""
    words = path.replace("/", "").replace("_", "").removesuffix("s")
    requests = [schema for schema in schemas() if schema.__name__.endswith("Request")]
    return [
        schema
        for schema in requests
        if words.endswith(schema.__name__.removesuffix("Request").lower().removesuffix("s"))
    ] or requests


def generate_values(schema: Json, defs: Json, ids: Mapping[str, str], name: str = "") -> st.SearchStrategy[Any]:
    """Return a strategy for values of a JSON schema, limits not always respected."""
    if "$ref" in schema:
        return st.deferred(lambda: generate_values(defs[schema["$ref"].rsplit("/", 1)[-1]], defs, ids, name))
    if "anyOf" in schema:
        return st.one_of([generate_values(part, defs, ids, name) for part in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            properties: Json = schema.get("properties", {})
            made = {key: mostly_valid(generate_values(part, defs, ids, key)) for key, part in properties.items()}
            required: list[str] = schema.get("required", [])
            whole = st.fixed_dictionaries(
                {key: made[key] for key in required},
                optional={key: part for key, part in made.items() if key not in required},
            )
            return whole if properties else st.dictionaries(st.text(max_size=5), _values(schema, defs, ids), max_size=2)
        case "array":
            return st.lists(generate_values(schema.get("items", {}), defs, ids, name), max_size=3)
        case "string":
            text = st.text(max_size=8)
            return st.one_of(st.just(ids[name]), text) if name in ids else text
        case "integer":
            return INTEGERS
        case "number":
            return FLOATS
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return WILD


def _values(schema: Json, defs: Json, ids: Mapping[str, str]) -> st.SearchStrategy[Any]:
    inner: object = schema.get("additionalProperties")
    return generate_values(cast(Json, inner), defs, ids) if isinstance(inner, dict) else st.one_of(WILD, DEEP)


def mostly_valid(fits: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy that mostly draws valid values, and sometimes anything."""
    return st.integers(0, 9).flatmap(lambda draw: WILD if draw == 0 else fits)


def bodies(path: str, ids: Mapping[str, str]) -> st.SearchStrategy[bytes]:
    """Return a strategy for bodies of a route: by its schema with existing ids, arbitrary JSON, and no JSON."""
    parts: list[st.SearchStrategy[Any]] = []
    for schema in find_schemas(path):
        document = schema.model_json_schema()
        parts.append(generate_values(document, document.get("$defs", {}), ids))
    known = st.fixed_dictionaries(
        {},
        optional={name: st.just(ids[name]) for name in ("session_id", "model_id", "sampling_session_id", "request_id")}
        | {"seq_id": INTEGERS, "model_seq_id": INTEGERS, "user_metadata": st.one_of(WILD, DEEP)},
    )
    fits = st.builds(lambda part, more: {**part, **more}, st.one_of(parts), known)
    values = st.one_of(fits, fits, st.dictionaries(st.text(max_size=5), st.one_of(WILD, DEEP), max_size=3), WILD)
    return st.one_of(*[values.map(lambda value: json.dumps(value).encode())] * 4, st.binary(max_size=30))


def paths(path: str, ids: Mapping[str, str]) -> st.SearchStrategy[str]:
    """Return a strategy for the path of a route with its parameters filled in."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    odd = st.sampled_from(["x", "%00", "%ff", "..", "%2e%2e", "%F0%9F%98%80", "0" * 500])
    values = {name: st.one_of(st.just(ids.get(name, "x")), odd) for name in names}
    return st.fixed_dictionaries(values).map(lambda filled: path.format(**filled))


HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "content-type": st.sampled_from(["application/json", "application/x-protobuf", "text/plain", ";"]),
        "content-encoding": st.sampled_from(["", "identity", "zstd", "gzip"]),
        "x-stainless-package-version": st.sampled_from(["0.38.0", "", "x" * 3000]),
    },
)
MOSTLY_PLAIN = st.one_of(st.just({}), st.just({}), HEADERS)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The arguments of one call."""

    place: str
    query: dict[str, str]
    body: bytes
    headers: dict[str, str]


def attempts(route: Route, ids: Mapping[str, str]) -> st.SearchStrategy[Attempt]:
    """Return a strategy for calls of a route."""
    query = {name: st.one_of(st.just(ids.get(name, "x")), _texts(schema, ids)) for name, schema in route.query}
    writes = route.method not in ("GET", "DELETE")
    return st.builds(
        Attempt,
        paths(route.path, ids),
        st.fixed_dictionaries({}, optional=query),
        bodies(route.path, ids) if writes else st.just(b""),
        MOSTLY_PLAIN,
    )


def _texts(schema: Json, ids: Mapping[str, str]) -> st.SearchStrategy[str]:
    return mostly_valid(generate_values(schema, {}, ids)).map(
        lambda value: value if isinstance(value, str) else str(value)[:400]
    )


def call(server: Server, tally: Tally, route: Route, attempt: Attempt) -> None:
    """Make a call and check the response. Raises ServerError, Hang or Finding."""
    said = f"{route.method} {attempt.place} {attempt.query} {attempt.headers} {attempt.body!r}"

    with tally.watch():
        try:
            answer = server.client.request(
                route.method,
                attempt.place,
                params=attempt.query or None,
                content=attempt.body,
                headers=attempt.headers,
                timeout=HANG_S,
            )
        except httpx.TimeoutException as error:
            raise Hang(said) from error
        except httpx.TransportError as error:
            raise ServerError(f"{said}: {error!r}") from error

    tally.statuses[answer.status_code] = tally.statuses.get(answer.status_code, 0) + 1
    if answer.status_code >= 500:
        raise ServerError(f"{said}: {answer.status_code} {answer.text}")
    if answer.status_code >= 400 and answer.status_code != 408 and not _message(answer.json()):
        raise Finding(f"{said}: {answer.status_code} without a word")


def _message(body: dict[str, Any]) -> object:
    """Return the message of an error, from `detail` or from the OpenAI or Anthropic format."""
    return body.get("detail") or body.get("error", {}).get("message")


def parse_attempt(line: str, ids: Mapping[str, str]) -> tuple[Route, Attempt]:
    """Parse a call of the corpus: JSON in which `<name>` is replaced by an existing id."""
    for name, known in ids.items():
        line = line.replace(f"<{name}>", known)
    kept: Json = json.loads(line)
    attempt = Attempt(kept["path"], kept.get("query", {}), kept.get("body", "").encode(), kept.get("headers", {}))
    return Route(kept.get("method", "POST"), kept["path"], ()), attempt
