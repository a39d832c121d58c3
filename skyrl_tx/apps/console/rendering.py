"""Render pages: formats for numbers and times, the template environment, and static files."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import cast
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from skyrl_tx.apps.console.login import SECURITY_HEADERS
from skyrl_tx.process.text import make_visible

STATIC = Path(__file__).parent / "static"
_TEMPLATES = Path(__file__).parent / "templates"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOREVER = "public, max-age=31536000, immutable"

_BARS_WIDTH, _BARS_HEIGHT = 800.0, 120.0
_GAP = 0.2
"""The gap between two bars, as a fraction of the distance between their left ends."""
_DASH = "–"
_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def format_count(value: float | None) -> str:
    """Format a count, for example "48.1M"."""
    if value is None or not math.isfinite(value):
        return _DASH
    for unit, size in _UNITS:
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if abs(scaled) < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 10 else f"{value:.1f}"


def format_number(value: float | None) -> str:
    """Format a measured number, for example "0.1235" or "1.23e-5"."""
    if value is None or not math.isfinite(value):
        return _DASH
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_size(num_bytes: float | None) -> str:
    """Format a number of bytes with a binary unit, for example "1.5 GiB"."""
    if num_bytes is None:
        return _DASH
    value = float(num_bytes)
    for unit in _BINARY[:-1]:
        if abs(value) < 1023.95:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_BINARY[-1]}"


def format_duration(seconds: float | None) -> str:
    """Format a duration with its one or two largest units, for example "2 h 5 min"."""
    if seconds is None or not math.isfinite(seconds):
        return _DASH
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"

    # From one minute on, two units
    whole = round(seconds)
    for unit, length, small, small_length in (
        ("d", _DAY, "h", _HOUR),
        ("h", _HOUR, "min", _MINUTE),
        ("min", _MINUTE, "s", 1),
    ):
        if whole >= length:
            rest = whole % length // small_length
            return f"{whole // length} {unit} {rest} {small}" if rest else f"{whole // length} {unit}"
    return f"{whole} s"


def format_age(at: float | None, now: float) -> str:
    """Format a time relative to `now`, for example "5 min ago" or "in 2 d"."""
    if at is None:
        return _DASH
    seconds = now - at
    if abs(seconds) < 2:
        return "now"
    rough = _round_duration(abs(seconds))
    return f"{rough} ago" if seconds > 0 else f"in {rough}"


def _round_duration(seconds: float) -> str:
    for unit, length in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_time(at: float | None) -> str:
    """Format a time in UTC, for example "2026-01-31 12:00:00 UTC"."""
    return _DASH if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_iso(at: float) -> str:
    """Format a time for the `datetime` attribute in HTML."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shorten_id(identifier: str) -> str:
    """Shorten the id of a session, run or sampler, for example to "3f9a2c1b:train:0"."""
    head, colon, rest = identifier.removeprefix("session-").partition(":")
    return head[:8] + colon + rest


Box = tuple[str, float, float, float, float]
"""CSS class, x, y, width and height of a part of a bar."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stacked bar."""

    title: str
    boxes: tuple[Box, ...]


def stack_bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> list[Bar]:
    """Draw a stacked bar for each row in an area of 800 x 120, scaled to the highest bar.

    A row is a title and the amounts by CSS class, from the bottom up.
    """
    highest = max((sum(amounts.values()) for _, amounts in rows), default=0.0)
    pitch = _BARS_WIDTH / max(len(rows), 1)
    bars: list[Bar] = []
    for index, (title, amounts) in enumerate(rows):
        boxes: list[Box] = []
        bottom = _BARS_HEIGHT
        for name, amount in amounts.items():
            if amount > 0:
                height = amount / highest * _BARS_HEIGHT
                bottom -= height
                width = pitch * (1 - _GAP)
                boxes.append((name, round(index * pitch, 2), round(bottom, 2), round(width, 2), round(height, 2)))
        bars.append(Bar(title, tuple(boxes)))
    return bars


_FILTERS: dict[str, Callable[..., object]] = {
    "count": format_count,
    "number": format_number,
    "size": format_size,
    "duration": format_duration,
    "ago": format_age,
    "moment": format_time,
    "iso": format_iso,
    "short_id": shorten_id,
    "clip": make_visible,
    "segment": partial(quote, safe=":"),  # text as one part of a path
}


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """The style sheets, scripts and images of the console, in memory.

    `digest` is a hash of all files. It is part of their URLs, so browsers can cache files forever.
    """

    files: Mapping[str, bytes]
    digest: str

    @classmethod
    def load(cls) -> "StaticFiles":
        """Read the files from the package."""
        paths = sorted(path for path in STATIC.rglob("*") if path.suffix in _TYPES)
        files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}
        hashed = hashlib.sha256()
        for name, content in files.items():
            hashed.update(f"{name}\0{len(content)}\0".encode() + content)
        return cls(files, hashed.hexdigest()[:16])

    def address(self, name: str) -> str:
        """Return the URL path of a file. Raises KeyError if it does not exist."""
        self.files[name]
        return f"/console/static/{self.digest}/{name}"

    async def serve(self, request: Request) -> Response:
        """Send a file.

        A request with an old digest gets the current file, but must not cache it.
        """
        name: str = request.path_params["name"]
        content = self.files.get(name)
        if content is None:
            return Response("this file does not exist", HTTPStatus.NOT_FOUND, headers=SECURITY_HEADERS)
        is_current = request.path_params["digest"] == self.digest
        headers = {**SECURITY_HEADERS, "Cache-Control": _FOREVER if is_current else "no-store"}
        return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])


def load_templates(static: StaticFiles) -> Environment:
    """Create the template environment.

    All text in templates is escaped, has its hidden characters replaced, and is truncated
    (`make_visible`).
    """
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
    return make_visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
