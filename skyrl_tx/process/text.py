"""Text for people: text of clients that is safe to print, and sizes and durations with units."""

import re

_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f"
)
"""Control characters except tab and newline, characters without width, and lone surrogates.

Characters that change the direction of text are included. They can make a text look different from
its content (Unicode Standard Annex #9; "Trojan Source", CVE-2021-42574).
"""
_IN_TEXT, _IN_LINE = re.compile(f"[{_HIDDEN}]"), re.compile(f"[\t\n{_HIDDEN}]")


def make_visible(text: str, max_chars: int = 20_000) -> str:
    r"""Replace hidden characters by escapes such as `\u202e`, and truncate to `max_chars`."""
    return _escape_hidden(_IN_TEXT, text, max_chars)


def make_line(text: str, max_chars: int = 20_000) -> str:
    """Replace the same characters as `make_visible`, and tabs and newlines.

    So the text stays on one line.
    """
    return _escape_hidden(_IN_LINE, text, max_chars)


def _escape_hidden(hidden: re.Pattern[str], text: str, max_chars: int) -> str:
    visible = hidden.sub(_escape, text[:max_chars])
    if len(text) <= max_chars and len(visible) <= max_chars:
        return visible
    return f"{visible[:max_chars]}… ({len(text):,} characters)"


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_BYTES = {unit: 1000**power for power, unit in enumerate(("", "K", "M", "G", "T"))} | {
    f"{unit}iB": 1024**power for power, unit in enumerate(("", "K", "M", "G", "T")) if unit
}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_bytes(text: str) -> int | None:
    """Return the number of bytes in a text, for example 64MiB, 1.5G or 2000000; None if it is no size.

    K, M, G and T are decimal units, as in the sizes of disks. A B may follow.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?) ?([KMGT]?)(iB|B|)", text.strip(), re.IGNORECASE)
    if match is None or (match[3].lower() == "ib" and not match[2]):
        return None
    unit = match[2].upper() + ("iB" if match[3].lower() == "ib" else "")
    return int(float(match[1]) * _BYTES[unit]) if "." in match[1] else int(match[1]) * _BYTES[unit]


def parse_seconds(text: str) -> float | None:
    """Return the seconds of a duration, for example 45s, 90m, 12h, 30d or 3600; None if it is no duration."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([smhd]?)", text.strip())
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def format_bytes(num_bytes: int) -> str:
    """Format a size, for example `1.5 GiB`."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration in the largest unit that gives a whole number, for example 7d or 90m."""
    for unit, length in sorted(_SECONDS.items(), key=lambda item: -item[1]):
        if unit and seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:g}s"
