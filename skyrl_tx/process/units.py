"""Sizes and durations with units, in flags, environment variables and files."""

import re

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
