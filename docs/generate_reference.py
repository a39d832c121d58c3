"""Generates docs/reference/ from the code: settings, endpoints, losses, models, recipes, metrics and the Python API.

`python -m docs.generate_reference` (`make reference`) writes the pages, and examples/config.yaml.
`tests/repo/test_reference.py` fails if a committed file differs from the generated one.
"""

import importlib.util
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Metric

from docs import example_config, reference_text
from docs.markdown import codes, first_line, sentence, table
from docs.openapi import read_openapi
from docs.python_api_page import python_api_page
from docs.settings_page import settings_page
from skyrl_tx import models
from skyrl_tx.apps.chat import CHAT
from skyrl_tx.apps.chat import routes as chat_routes
from skyrl_tx.apps.chat.routes import ANTHROPIC_PREFIX, OPENAI_PREFIXES
from skyrl_tx.compose import APPS
from skyrl_tx.contract.state_files import ALPHA
from skyrl_tx.engine.metrics import EngineMetrics
from skyrl_tx.launch.command import load_server_extensions
from skyrl_tx.losses import LOSSES, MEANS, Loss
from skyrl_tx.models import FAMILIES, ModelFamily
from skyrl_tx.server.app import ROUTERS
from skyrl_tx.server.monitoring import ApiMetrics
from skyrl_tx.server.schemas.base import BODIES, WireModel
from skyrl_tx.server.submission.loss_graph.torch_functions import FUNCTIONS, METHODS
from skyrl_tx.tools.conformance.traffic import SDK_ENDPOINTS, UNVERIFIED_ENDPOINTS, SdkEndpoint
from tests.support.client_environments import COOKBOOK, SDKS

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
RECIPES = ROOT / "tests" / "recipes"
PREFIX = "/api/v1"
_WIDTH = 96
NOTE = "<!-- Generated. Edit the code or docs/reference_text.py, then run make reference. -->"


def generate() -> dict[str, str]:
    """Return the text of each page by its file name."""
    pages = {
        "settings.md": settings_page(),
        "endpoints.md": endpoints_page(),
        "losses.md": losses_page(),
        "models.md": models_page(),
        "recipes.md": recipes_page(),
        "metrics.md": metrics_page(),
        "python_api.md": python_api_page(),
    }
    return {name: _page(blocks) for name, blocks in pages.items()}


def _page(blocks: Iterable[str]) -> str:
    title, *rest = (block.strip() for block in blocks)
    return "\n\n".join([title, NOTE, *rest]) + "\n"


# Endpoints


def endpoints_page() -> Iterator[str]:
    """Yield the page of all endpoints, by router."""
    yield "# Endpoints"
    yield reference_text.ENDPOINTS_INTRO

    # All endpoints, by router.
    operations = read_openapi()["paths"]
    for module, endpoints in _group_routes_by_module().items():
        package, _, name = module.rpartition(".")
        title = package.rpartition(".")[2] if name == "routes" else name  # an app has its endpoints in `routes`
        yield f"## {title.replace('_', ' ').capitalize()}"
        yield first_line(sys.modules[module])
        for route in endpoints:
            yield from _describe_endpoint(route, operations[_get_path(route, operations)])
    yield from _make_chat_endpoints()

    # Parity with the SDK, and the fields of all requests.
    yield "## Parity with the SDK"
    yield reference_text.PARITY
    yield table(
        ("Endpoint", "SDK", "Called by", "Answer"),
        (_make_parity_row(endpoint, operations) for endpoint in (*SDK_ENDPOINTS, *UNVERIFIED_ENDPOINTS)),
    )
    yield "## Fields of requests"
    yield "Optional fields are marked with `?`. An unknown field that would change the computation is an error."
    yield "\n".join(f"- `{name}`: {_list_fields(BODIES[name])}" for name in sorted(BODIES))
    yield "## Not supported"
    yield reference_text.UNSUPPORTED


def _make_parity_row(endpoint: SdkEndpoint, operations: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the row of an endpoint of the SDK. How this server answers follows from its OpenAPI paths."""
    found = operations.get(PREFIX + endpoint.path, {}).get(endpoint.method.lower())
    if found is None:
        answer = "**404**"
    elif "FutureHandle" in str(found["responses"]):
        answer = "a future"
    else:
        answer = "long poll" if "long poll" in found["description"] else "at once"
    return f"`{endpoint.method} {endpoint.path}`", endpoint.releases, endpoint.callers, answer


def _make_chat_endpoints() -> Iterator[str]:
    """Yield the OpenAI and Anthropic endpoints."""
    yield "## OpenAI and Anthropic"
    yield reference_text.CHAT_ENDPOINTS
    for prefix, router in ((OPENAI_PREFIXES[0], chat_routes.openai), (ANTHROPIC_PREFIX, chat_routes.anthropic)):
        for route in (route for route in router.routes if isinstance(route, APIRoute) and route.include_in_schema):
            (method,) = route.methods
            yield f"### `{method} {prefix}{route.path_format}`"
            yield first_line(route.endpoint)


def _get_path(route: APIRoute, paths: Collection[str]) -> str:
    """Return the path of a route: below the prefix of all, unless its router has its own."""
    return route.path_format if route.path_format in paths else PREFIX + route.path_format


def _group_routes_by_module() -> Mapping[str, list[APIRoute]]:
    """Return the routes of each module that has a section, in the order in which they are matched."""
    # The endpoints of the chat app have a section without a heading for each module.
    extensions = load_server_extensions([app for app in APPS if app is not CHAT]).values()
    routers = [*ROUTERS, *(router for extension in extensions for router in extension.routers)]
    found: dict[str, list[APIRoute]] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                found.setdefault(route.endpoint.__module__, []).append(route)
    return found


def _describe_endpoint(route: APIRoute, operations: Mapping[str, Any]) -> Iterator[str]:
    for method in sorted(route.methods):
        operation = operations[method.lower()]
        facts: list[str] = []
        if queries := [p["name"] for p in operation.get("parameters", []) if p["in"] == "query"]:
            facts.append(f"query {codes(queries)}")
        if body := _get_schema_name(operation.get("requestBody", {})):
            facts.append(f"request `{body}`")
        for status, response in sorted(operation["responses"].items()):
            if status.startswith("2"):
                name = _get_schema_name(response)
                facts.append(f"response `{name}`" if name else f"response {status}")
        yield f"### `{method} {route.path_format.removeprefix(PREFIX)}`"
        yield f"{first_line(route.endpoint)}\n\n{sentence(' · '.join(facts))}"


def _get_schema_name(message: Mapping[str, Any]) -> str:
    """Return the name of the JSON schema of a body or response, empty if there is none."""
    schema = message.get("content", {}).get("application/json", {}).get("schema", {})
    return schema.get("$ref", "").rpartition("/")[2]


def _list_fields(schema: type[WireModel]) -> str:
    return ", ".join(
        f"`{field.alias or name}{'' if field.is_required() else '?'}`" for name, field in schema.model_fields.items()
    )


# Losses and metrics


def losses_page() -> Iterator[str]:
    """Yield the page of all losses, and of the metrics of training requests."""
    yield "# Losses and metrics"
    yield reference_text.LOSSES_INTRO
    yield "## Losses"
    yield table(
        ("Loss", "Required inputs next to `target_tokens`", "Config and defaults"),
        (
            (f"[`{name}`](#{name})", ", ".join(_list_required_inputs(loss)) or "–", _format_config(loss))
            for name, loss in LOSSES.items()
        ),
    )
    yield reference_text.LOSS_NUMBERS

    # One section for each loss.
    for name, loss in LOSSES.items():
        yield f"### `{name}` {{ #{name} }}"
        yield _escape_formulas(inspect.getdoc(sys.modules[loss.function.__module__]) or "")
        yield "Function: " + _escape_formulas(inspect.getdoc(loss.function) or "").removeprefix("Return ")
        if optional := [i for i, described in loss.spec.inputs.items() if described.fill is not None]:
            yield f"Optional inputs: {codes(optional)}."
        if wide := [i for i, described in loss.spec.inputs.items() if described.max_ndim == 2]:
            yield f"{codes(wide)} may have the shape (N, K): K weighted targets at each position."
        if name in reference_text.LOSS_NOTES:
            yield reference_text.LOSS_NOTES[name]

    # Custom losses and metrics.
    yield "## Custom losses"
    yield reference_text.CUSTOM_LOSSES
    named = sorted({name for name in FUNCTIONS if not name.startswith(("torch._C", "operator.")) and name != "getattr"})
    yield f"Functions: {codes(named)}."
    yield f"Methods of tensors: {codes(sorted(METHODS))}."
    yield "## Metrics"
    yield reference_text.METRICS.format(policy=codes(MEANS))


def _escape_formulas(text: str) -> str:
    """Keep formulas of docstrings from being read as markup."""
    return text.replace("*", "·").replace("_", r"\_")


def _list_required_inputs(loss: Loss) -> list[str]:
    """Return the inputs that a client has to send. With provenance spans, the server adds `logprobs` and `sampled`."""
    names = [name for name, described in loss.spec.inputs.items() if described.fill is None and name != "target_tokens"]
    if loss.spec.needs_provenance:
        return [*(f"`{name}`" for name in names if name not in ("logprobs", "sampled")), "provenance spans"]
    return [f"`{name}`" for name in names]


def _format_config(loss: Loss) -> str:
    return ", ".join(f"`{key}` {default}" for key, default in loss.spec.config.items()) or "–"


# Models


def models_page() -> Iterator[str]:
    """Yield the page of all model families."""
    yield "# Supported models"
    yield reference_text.MODELS_INTRO
    families = list({family.architecture: family for family in FAMILIES.values()}.values())
    yield table(
        ("Architecture", "File", "Feed-forward", "Attention", "Shares prefixes"), map(_describe_family, families)
    )
    yield "\n".join(f"- {codes(family.names)}: {_describe_module(family)}" for family in families)
    yield reference_text.ADAPTERS.format(alpha=ALPHA)


def _describe_module(family: ModelFamily) -> str:
    """Return the docstring of a family's module in one line, with its sources."""
    return " ".join((_find_module(family).__doc__ or "").split())


def _find_module(family: ModelFamily) -> ModuleType:
    for found in pkgutil.iter_modules(models.__path__):
        module = importlib.import_module(f"{models.__name__}.{found.name}")
        if any(value is family for value in vars(module).values()):
            return module
    raise AssertionError(f"no module defines {family.architecture}")


def _describe_family(family: ModelFamily) -> tuple[str, ...]:
    has = {rule.path.removeprefix("layers.") for rule in family.weights}
    biases = "biases" if "o_bias" in has else "QKV biases"
    names = (("QK norm", "q_norm"), (biases, "q_bias"), ("sinks", "sinks"))
    attention = [name for name, path in names if path in has]
    attention += ["latents"] if "kv_a_proj" in has else []
    attention += ["gated", "delta nets in most layers"] if "in_proj_q" in has else []
    attention += ["no ropes", "Mamba-2 in most layers"] if "in_proj_dt" in has else []
    attention += ["sliding windows"] if "sliding_window" in family.defaults else []
    return (
        codes(family.names),
        f"`{_find_module(family).__name__.replace('.', '/')}.py`",
        _describe_feed_forward(has),
        ", ".join(attention) or "plain",
        "no" if "in_proj_dt" in has else "yes",
    )


def _describe_feed_forward(has: set[str]) -> str:
    if "router" not in has:
        return "dense"
    return "mixture of experts" + (", one of them shared" if "shared_up_proj" in has else "")


# Metrics


def metrics_page() -> Iterator[str]:
    """Yield the page of all metrics, by process."""
    yield "# Metrics"
    yield reference_text.METRIC_FAMILIES_INTRO
    for title, registry in ("API", ApiMetrics().registry), ("Engine", EngineMetrics().registry):
        yield f"## {title}"
        rows = [
            _describe_metric_family(collector, family)
            for collector in set(_list_collectors(registry))
            for family in collector.collect()
        ]
        yield table(("Metric", "Type", "Labels", "Meaning"), sorted(rows))


def _list_collectors(registry: CollectorRegistry) -> Iterable[Any]:
    return registry._collector_to_names  # the library has no public way to learn the labels of a family


def _describe_metric_family(collector: object, family: Metric) -> tuple[str, ...]:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", None) or ()
    return f"`{family.name}{suffix}`", family.type, codes(labels) or "–", sentence(family.documentation)


# Recipes


def recipes_page() -> Iterator[str]:
    """Yield the page of the cookbook's recipes that the tests run."""
    recipes = _load(RECIPES / "test_recipes.py")
    (cookbook,) = COOKBOOK.no_deps
    yield "# Cookbook recipes"
    yield reference_text.RECIPES_INTRO.format(cookbook=cookbook.partition("==")[2])
    yield reference_text.RECIPE_NAMES
    yield reference_text.TRAINING_RECIPES
    for name, recipe in recipes.RECIPES.items():
        yield f"### {name}"
        yield f"```bash\n{_write_command(recipe.module, recipes.MODEL_NAME, recipe.arguments)}\n```"
        checked = inspect.getdoc(recipe.check) or "The recipe runs to its end, and its steps are counted once"
        yield textwrap.fill(f"*Checked by the test:* {sentence(checked)}", _WIDTH)
    yield reference_text.OTHER_RECIPES
    yield reference_text.NOT_RUN.format(sdks=", ".join(SDKS))


def _write_command(module: str, model_name: str, arguments: Iterable[str]) -> str:
    """Return the command line of a recipe, broken into lines of a readable length."""
    log = f"log_path=logs/{module.removesuffix('.train')}"
    parts = [f"python -m tinker_cookbook.recipes.{module}", f"model_name={model_name}", log, *arguments]
    lines = [""]
    for part in parts:
        word = part.replace("{checkpoint}", "CHECKPOINT")
        if lines[-1] and len(f"{lines[-1]} {word}") > _WIDTH:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _load(path: Path) -> ModuleType:
    """Import a test module by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


def main() -> None:
    """Write the pages and the example of a configuration file."""
    REFERENCE.mkdir(exist_ok=True)
    for name, text in generate().items():
        (REFERENCE / name).write_text(text)
    example_config.PATH.write_text(example_config.example_config())


if __name__ == "__main__":
    main()
