"""How pages become HTML: templates with their filters, and the style sheets and scripts that pages load."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import cast
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from skyrl_tx.apps.console import format
from skyrl_tx.apps.console.guard import SECURITY_HEADERS

STATIC = Path(__file__).parent / "static"
_TEMPLATES = Path(__file__).parent / "templates"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOREVER = "public, max-age=31536000, immutable"
_FILTERS: dict[str, Callable[..., object]] = {
    "count": format.format_count,
    "number": format.format_number,
    "size": format.format_size,
    "duration": format.format_duration,
    "ago": format.format_age,
    "moment": format.format_time,
    "iso": format.format_iso,
    "short_id": format.shorten_id,
    "clip": format.make_visible,
    "segment": partial(quote, safe=":"),  # text as one part of a path
}


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """All files in memory, by name, and the hash that is part of their addresses and changes with their content."""

    files: Mapping[str, bytes]
    digest: str

    @classmethod
    def load(cls) -> "StaticFiles":
        """Read the files of the package."""
        paths = sorted(path for path in STATIC.rglob("*") if path.suffix in _TYPES)
        files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}
        hashed = hashlib.sha256()
        for name, content in files.items():
            hashed.update(f"{name}\0{len(content)}\0".encode() + content)
        return cls(files, hashed.hexdigest()[:16])

    def address(self, name: str) -> str:
        """Return the address of a file. Raises KeyError if there is none."""
        self.files[name]
        return f"/console/static/{self.digest}/{name}"

    async def serve(self, request: Request) -> Response:
        """Send a file. Under an old address it is sent too, without leave to keep it."""
        name: str = request.path_params["name"]
        content = self.files.get(name)
        if content is None:
            return Response("there is no such file", HTTPStatus.NOT_FOUND, headers=SECURITY_HEADERS)
        is_current = request.path_params["digest"] == self.digest
        headers = {**SECURITY_HEADERS, "Cache-Control": _FOREVER if is_current else "no-store"}
        return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])


def load_templates(static: StaticFiles) -> Environment:
    """Return the templates: text of users is escaped, made visible and bounded wherever it is written."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_make_visible,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    names["static"] = static.address
    environment.filters.update(_FILTERS)
    return environment


def _make_visible(value: object) -> object:
    return format.make_visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
