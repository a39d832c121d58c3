"""Lookup of installed backends by the name of their entry point, in this package or another."""

from importlib.metadata import entry_points

from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.errors import UserError

GROUP = "skyrl_tx.backends"


def find_backend(name: str) -> BackendSpec:
    """Return the spec of a backend. Raises UserError, with the installed names, if there is none of that name."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise UserError(f"backend {name!r} is not installed; installed are: {', '.join(sorted(found)) or 'none'}")
    spec = found[name].load()
    if not isinstance(spec, BackendSpec):
        raise UserError(f"backend {name!r}: entry point {found[name].value!r} is no BackendSpec")
    return spec
