"""Makes text of clients safe to print in log lines, tables, pages and error messages."""

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
