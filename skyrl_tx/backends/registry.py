"""Find backends, samplers and launchers by the names of their entry points, in any package."""

from importlib.metadata import entry_points
from typing import TypeVar

from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.sampler import SamplerSpec

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
    installed package has an entry point of this name, or if its object is not a `spec_class`.
    """
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        raise UserError(f"{kind} {name!r} is not installed; installed are: {', '.join(sorted(installed)) or 'none'}")
    spec = installed[name].load()
    if not isinstance(spec, spec_class):
        raise UserError(
            f"{kind} {name!r}: entry point {installed[name].value!r} must refer to a {spec_class.__name__}, "
            f"not to an object of type {type(spec).__name__}"
        )
    return spec


def list_installed(group: str) -> list[str]:
    """Return the names of the entry points of a group, in alphabetical order."""
    return sorted({entry.name for entry in entry_points(group=group)})
