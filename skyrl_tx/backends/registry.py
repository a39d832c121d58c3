"""Find backends, samplers and launchers by the names of their entry points, in any package. Start backends."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from pydantic import BaseModel

from skyrl_tx.contract.backend import AbstractBackend, BackendSpec
from skyrl_tx.contract.errors import BackendLost, RequestError, UserError
from skyrl_tx.contract.sampler import SamplerSpec
from skyrl_tx.process.setup import CannotServe

BACKEND_GROUP = "skyrl_tx.backends"
SAMPLER_GROUP = "skyrl_tx.samplers"
S = TypeVar("S")


def find_backend(name: str) -> BackendSpec:
    """Return the spec of a backend, for example `jax`. Raises UserError if it is not installed."""
    return find_spec(BACKEND_GROUP, "backend", name, BackendSpec)


def find_sampler(name: str) -> SamplerSpec:
    """Return the spec of a sampler, for example `vllm`. Raises UserError if it is not installed."""
    return find_spec(SAMPLER_GROUP, "sampler", name, SamplerSpec)


def find_spec(group: str, kind: str, name: str, spec_class: type[S]) -> S:
    """Return the object that an entry point refers to.

    `kind` describes the entry point in messages, for example "backend". Raises UserError if no
    installed package has an entry point of this name, if it cannot be loaded, or if its object is
    not a `spec_class`.
    """
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        raise UserError(f"{kind} {name!r} is not installed; installed are: {', '.join(sorted(installed)) or 'none'}")
    entry = installed[name]
    package = f" of package {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    where = f"{kind} {name!r}: entry point {entry.value!r}{package}"

    try:
        spec = entry.load()
    except Exception as error:  # importing the package of someone else may raise anything
        raise UserError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(spec, spec_class):
        found = f"the class {spec.__name__}" if isinstance(spec, type) else f"an object of type {type(spec).__name__}"
        raise UserError(f"{where} must refer to a {spec_class.__name__}, not to {found}")
    return spec


def list_specs(
    group: str, kind: str, spec_class: type[S], on_broken: Callable[[UserError], object] = lambda _: None
) -> dict[str, S]:
    """Return the objects of all entry points of a group by name.

    Leaves out an entry point that cannot be loaded, and calls `on_broken` with the reason.
    """
    specs: dict[str, S] = {}
    for name in sorted({entry.name for entry in entry_points(group=group)}):
        try:
            specs[name] = find_spec(group, kind, name, spec_class)
        except UserError as error:
            on_broken(error)
    return specs


def start_backend(name: str, spec: BackendSpec, base_model: str, config: BaseModel) -> AbstractBackend:
    """Import and start a backend.

    Errors about a wrong model, path or setting keep their type. Raises CannotServe for other errors.
    """
    try:
        backend = spec.load()(base_model, config)
        if not isinstance(backend, AbstractBackend):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"load() must return a subclass of AbstractBackend, not {type(backend).__name__}")
        return backend
    except (RequestError, OSError, ValueError, BackendLost):
        raise
    except Exception as error:
        raise CannotServe(f"backend {name!r}: start failed: {type(error).__name__}: {error}") from error
