"""Checks of the installed packages: their versions, JAX's parts, and the Tinker SDK."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from skyrl_tx import DISTRIBUTION, __version__
from skyrl_tx.tools.doctor.findings import Finding, Subject, error, ok, warning

OLDEST_SDK = "0.16.1"
"""The oldest release of the Tinker SDK that is tested; `tests/support/client_environments.py` has all."""
_JAX_PARTS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def check_packages(subject: Subject) -> Iterator[Finding]:
    """Check the installed version of each required package, and those that must be equal."""
    found = list(_unmet())
    yield from found
    if not found:
        yield ok("packages", f"skyrl_tx {__version__} with JAX {installed('jax')}; all required packages are there")
    parts = {name: text for name in _JAX_PARTS if (text := installed(name)) is not None}
    if len({Version(text).release for text in parts.values()}) > 1:
        shown = ", ".join(f"{name} {text}" for name, text in parts.items())
        yield error("packages", f"parts of JAX have different versions: {shown}", "install them together, as an extra")
    if (subject.settings.store_url or "").startswith("postgres") and installed("psycopg") is None:
        advice = f"pip install '{DISTRIBUTION}[postgres]'"
        yield error("packages", "psycopg is not installed, which PostgreSQL needs", advice)
    yield from _check_sdk()


def _unmet() -> Iterator[Finding]:
    if installed(DISTRIBUTION) is None:
        advice = "pip uninstall skyrl_tx, its name in earlier releases, then pip install . in a clone"
        yield error("packages", f"{DISTRIBUTION} is not installed, so its requirements are not known", advice)
        return
    for text in requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra, which need not be installed
        present, advice = installed(requirement.name), f"pip install '{requirement.name}{requirement.specifier}'"
        if present is None:
            yield error("packages", f"{requirement.name} is not installed", advice)
        elif not requirement.specifier.contains(present, prereleases=True):
            yield error("packages", f"{requirement.name} {present} is installed, needed is {requirement}", advice)


def _check_sdk() -> Iterator[Finding]:
    present = installed("tinker")
    if present is None:
        yield ok("sdk", f"the Tinker SDK is not installed here; clients need {OLDEST_SDK} or newer")
    elif Version(present) < Version(OLDEST_SDK):
        advice = f"pip install 'tinker>={OLDEST_SDK}'"
        yield warning("sdk", f"tinker {present} is older than any that is tested", advice)
    else:
        yield ok("sdk", f"tinker {present}")


def installed(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
