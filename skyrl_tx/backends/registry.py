"""Lookup of backends, samplers and launchers by the names of their entry points, in this package or another."""

from importlib.metadata import entry_points
from typing import TypeVar

from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.sampler import SamplerSpec

BACKEND_GROUP = "skyrl_tx.backends"
SAMPLER_GROUP = "skyrl_tx.samplers"
S = TypeVar("S")


def find_backend(name: str) -> BackendSpec:
    """Return the spec of a backend. Raises UserError, with the installed names, if there is none of that name."""
    return find_spec(BACKEND_GROUP, "backend", name, BackendSpec)


def find_sampler(name: str) -> SamplerSpec:
    """Return the spec of a sampler. Raises UserError, with the installed names, if there is none of that name."""
    return find_spec(SAMPLER_GROUP, "sampler", name, SamplerSpec)


def find_spec(group: str, kind: str, name: str, spec_class: type[S]) -> S:
    """Return the spec of an entry point. Raises UserError, with the installed names, if there is none of that name."""
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        raise UserError(f"{kind} {name!r} is not installed; installed are: {', '.join(sorted(found)) or 'none'}")
    spec = found[name].load()
    if not isinstance(spec, spec_class):
        raise UserError(f"{kind} {name!r}: entry point {found[name].value!r} is no {spec_class.__name__}")
    return spec


def list_installed(group: str) -> list[str]:
    """Return the names of the entry points of a group."""
    return sorted({entry.name for entry in entry_points(group=group)})
