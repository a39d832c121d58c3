"""Text of users in pages: always visible, never obeyed, and of bounded length."""

import re

_MAX_CHARS = 20_000
# Control characters but tab and newline, and the marks that change the direction of text or have no width
# (Unicode Standard Annex #9; "Trojan Source", CVE-2021-42574).
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def visible(text: str, max_chars: int = _MAX_CHARS) -> str:
    r"""Return text with control and direction characters as escapes such as `\u202e`, cut to a length."""
    cut = _HIDDEN.sub(_escape, text[:max_chars])
    return cut if len(text) <= max_chars else f"{cut}… ({len(text):,} characters)"


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
