"""The tokenizer files of the served model, found where the backend finds them, without its libraries."""

import json
from functools import cache
from pathlib import Path
from typing import cast

from skyrl_tx.contract.errors import UserError

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


def find(model: str, name: str) -> Path | None:
    """Return a file of a model given as a directory or hub id; None if the model has no such file.

    A file of the hub is taken from its cache, and downloaded only if the cache has nothing of it.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        path = directory / name
        return path if path.is_file() else None
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        return None
    return _from_hub(model, name)


def _from_hub(model: str, name: str) -> Path | None:
    # Imported late, because it takes half a second.
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError

    cached = try_to_load_from_cache(model, name)
    if isinstance(cached, str):
        return Path(cached)
    if _has_any(model):  # the backend has downloaded what there is
        return None
    try:
        return Path(hf_hub_download(model, name))
    except (OSError, ValueError, HfHubHTTPError):
        return None


def _has_any(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def read_config(model: str) -> dict[str, object]:
    """Return the content of `tokenizer_config.json`; empty if there is none. Raises UserError if it is malformed."""
    path = find(model, CONFIG)
    if path is None:
        return {}
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{CONFIG} of the model is malformed: {error}") from error
    return cast(dict[str, object], content) if isinstance(content, dict) else {}


@cache
def byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand for themselves; the others are numbered from U+0100 (Radford et al. 2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
