"""The reference page of all settings, generated from the settings classes."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pydantic
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs import reference_text
from docs.markdown import first_line, sentence
from skyrl_tx.backends.registry import find_backend, find_sampler
from skyrl_tx.compose import APP_SETTINGS
from skyrl_tx.engine.settings import EngineFlags
from skyrl_tx.launch.settings import ENVIRONMENT_PREFIX, QuickstartSettings, list_short_flags, make_settings_class
from skyrl_tx.server.settings import ApiFlags


def settings_page() -> Iterator[str]:
    """Yield the page of all settings, by component."""
    yield "# Settings"
    yield reference_text.SETTINGS_INTRO
    api, engine = set(ApiFlags.model_fields), set(EngineFlags.model_fields)
    composed = make_settings_class(find_backend("jax"), {}, apps=APP_SETTINGS)
    app_fields = {name for settings in APP_SETTINGS for name in settings.model_fields}
    other = {*api, *engine, *app_fields, *list_short_flags(), "backend_config", "sampler_config"}

    # The settings of the server, by the component that reads them.
    groups: Mapping[str, Callable[[str], bool]] = {
        "Server": lambda name: name not in other,
        "API and engine": lambda name: name in api & engine,
        "API": lambda name: name in api - engine,
        "Engine": lambda name: name in engine - api,
        "Apps": lambda name: name in app_fields,
    }
    for title, belongs in groups.items():
        fields = {name: field for name, field in composed.model_fields.items() if belongs(name)}
        yield f"## {title}"
        yield from _describe_settings(fields)

    # Settings of the backend, the sampler and the quickstart.
    config = find_backend("jax").config
    yield "## Backend `jax`"
    yield first_line(config)
    yield from _describe_settings(config.model_fields, prefix=("backend_config",))
    config = find_sampler("vllm").config
    yield "## Sampler `vllm`"
    yield first_line(config)
    yield from _describe_settings(config.model_fields, prefix=("sampler_config",))
    yield "## `skyrl-tx quickstart`"
    yield "The quickstart reads no environment and no file, so that a first run is the same everywhere."
    yield from _describe_settings(QuickstartSettings.model_fields, has_environment=False)


def _describe_settings(
    fields: Mapping[str, FieldInfo],
    *,
    prefix: tuple[str, ...] = (),
    has_environment: bool = True,
) -> Iterator[str]:
    for name, field in fields.items():
        path = (*prefix, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            yield from _describe_settings(field.annotation.model_fields, prefix=path, has_environment=has_environment)
            continue

        # The facts below the description: type, default, variable and short flag.
        flag = "--" + ".".join(path).replace("_", "-")
        facts = [_describe_type(field), _describe_default(field)]
        if has_environment:
            facts.append(f"`{ENVIRONMENT_PREFIX}{'__'.join(path).upper()}`")
        for short in (
            short for short, setting in list_short_flags().items() if (f"{setting.kind}_config", setting.field) == path
        ):
            facts.append(f"also `--{short.replace('_', '-')}`, `{ENVIRONMENT_PREFIX}{short.upper()}`")
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("changes_results"):
            facts.append("**changes results bitwise**")

        yield f"### `{flag}`"
        yield f"{sentence(field.description or '')}\n\n{' · '.join(facts)}"


def _describe_type(field: FieldInfo) -> str:
    """Describe a field's type and bounds."""
    text = _name_type(field.annotation)
    bounds = [
        f"{word} {limit:,}"
        for bound in field.metadata
        for kind, word, limit in (
            (Ge, "at least", getattr(bound, "ge", None)),
            (Gt, "greater than", getattr(bound, "gt", None)),
            (Le, "at most", getattr(bound, "le", None)),
            (Lt, "less than", getattr(bound, "lt", None)),
        )
        if isinstance(bound, kind)
    ]
    return ", ".join([text, *bounds])


def _name_type(annotation: Any) -> str:
    names = {bool: "switch", int: "integer", float: "number", Path: "path", str: "text"}
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if get_origin(annotation) is list:
        return f"list of {_name_type(arguments[0])}, separated by commas"
    if get_origin(annotation) is dict:
        return f"JSON object of a {_name_type(arguments[1])} by name"
    if get_origin(annotation) is Union or len(arguments) != len(get_args(annotation)):
        return " or ".join(_name_type(argument) for argument in arguments)
    return names.get(annotation, "text")


def _describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined:
        return "default: depends on the user's environment"

    match field.default:
        case None:
            return "default: unset"
        case bool():
            return f"default: {'on' if field.default else 'off'}"
        case []:
            return "default: none"
        case dict():
            return f"default: `{json.dumps(field.default)}`"
        case int() | float():
            return (
                f"default: `{field.default:.12g}`"
                if isinstance(field.default, float)
                else _format_integer(field.default)
            )
        case _:
            return f"default: `{field.default}`"


def _format_integer(value: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= size and value % size == 0:
            return f"default: `{value}` ({value // size} {unit})"
    return f"default: `{value}`"
