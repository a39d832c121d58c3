"""Generates examples/config.yaml from the settings classes: every setting with its description and its default."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from skyrl_tx.backends.registry import find_backend
from skyrl_tx.compose import APP_SETTINGS
from skyrl_tx.engine.settings import EngineFlags
from skyrl_tx.launch.settings import DEFAULT_BACKEND, list_short_flags, make_settings_class
from skyrl_tx.server.settings import ApiFlags

PATH = Path(__file__).parents[1] / "examples" / "config.yaml"
_WIDTH = 118
_INTRO = """\
Settings of `skyrl-tx serve --config config.yaml`. Each has its default here: remove the # in front of its name
to set another value. Environment variables override this file, and flags override both: `data_dir` is also
SKYRL_TX_DATA_DIR and --data-dir. `skyrl-tx doctor --config config.yaml` examines the machine with this file.
Written by `make reference`."""
_FROM_THE_USER = {
    "data_dir": "~/.local/share/skyrl_tx",
    "compile_cache_dir": "/home/USER/.cache/skyrl_tx/xla",  # a backend gets its paths as they are
}
"""Defaults that depend on the user's environment."""
_FIRST = "base_model"
"""The only setting without a default."""
_FIRST_VALUE = "Qwen/Qwen3-0.6B"


def example_config() -> str:
    """Return the text of the file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    # The introduction and the base model.
    yield from _comment(_INTRO, "")
    api, engine = set(ApiFlags.model_fields), set(EngineFlags.model_fields)
    composed = make_settings_class(find_backend(DEFAULT_BACKEND), {}, apps=APP_SETTINGS)
    yield from _setting(_FIRST, composed.model_fields[_FIRST], "")

    # All other settings, as comments.
    fields = {
        name: field
        for name, field in composed.model_fields.items()
        if name not in {_FIRST, "config", "backend_config", "sampler_config", *list_short_flags()}
    }
    for title, names in (
        ("Server", [name for name in fields if name not in api ^ engine]),
        ("API", [name for name in fields if name in api - engine]),
        ("Engine", [name for name in fields if name in engine - api]),
    ):
        yield from _title(title)
        for name in names:
            yield from _setting(name, fields[name], "")

    yield from _title(f"Backend {DEFAULT_BACKEND}")
    yield ""
    yield "backend_config:"
    yield from _settings(find_backend(DEFAULT_BACKEND).config.model_fields, "  ")


def _title(text: str) -> Iterator[str]:
    yield from ("", "", f"# {text}", f"# {'-' * len(text)}")


def _settings(fields: Mapping[str, FieldInfo], indent: str) -> Iterator[str]:
    for name, field in fields.items():
        yield from _setting(name, field, indent)


def _setting(name: str, field: FieldInfo, indent: str) -> Iterator[str]:
    yield ""
    yield from _comment(" ".join((field.description or "").split()), indent)
    if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
        yield f"{indent}#{name}:"
        yield from _settings(field.annotation.model_fields, f"{indent}  ")
    elif field.is_required():
        yield f"{name}: {_FIRST_VALUE}"
    else:
        yield f"{indent}#{name}: {_value(name, field)}"


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in text.splitlines():
        yield from textwrap.wrap(
            line, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
        )


def _value(name: str, field: FieldInfo) -> str:
    default: Any = _FROM_THE_USER[name] if field.default is PydanticUndefined else field.default
    if isinstance(default, int) and not isinstance(default, bool):
        return f"{default}{_in_units(default)}"
    if isinstance(default, float):
        return f"{default:.12g}"
    return yaml.safe_dump(default, default_flow_style=True).removesuffix("\n...\n").strip()


def _in_units(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor and size % factor == 0:
            return f"  # {size // factor} {unit}"
    return ""
