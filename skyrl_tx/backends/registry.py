"""Lookup of installed backends and samplers by the names of their entry points, in this package or another."""

from importlib.metadata import EntryPoint, entry_points

from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.sampler import SamplerSpec

GROUP = "skyrl_tx.backends"
SAMPLER_GROUP = "skyrl_tx.samplers"


def find_backend(name: str) -> BackendSpec:
    """Return the spec of a backend. Raises UserError, with the installed names, if there is none of that name."""
    entry = _find(GROUP, "backend", name)
    spec = entry.load()
    if not isinstance(spec, BackendSpec):
        raise UserError(f"backend {name!r}: entry point {entry.value!r} is no BackendSpec")
    return spec


def find_sampler(name: str) -> SamplerSpec:
    """Return the spec of a sampler. Raises UserError, with the installed names, if there is none of that name."""
    entry = _find(SAMPLER_GROUP, "sampler", name)
    spec = entry.load()
    if not isinstance(spec, SamplerSpec):
        raise UserError(f"sampler {name!r}: entry point {entry.value!r} is no SamplerSpec")
    return spec


def _find(group: str, kind: str, name: str) -> EntryPoint:
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        raise UserError(f"{kind} {name!r} is not installed; installed are: {', '.join(sorted(found)) or 'none'}")
    return found[name]
