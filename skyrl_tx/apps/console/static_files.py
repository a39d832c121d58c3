"""Style sheets and scripts of the console, in memory, under addresses that change with their content."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from skyrl_tx.apps.console.guard import SECURITY_HEADERS

STATIC = Path(__file__).parent / "static"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """All files by name, and the hash that is part of their addresses."""

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
