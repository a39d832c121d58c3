"""Remember on disk which row counts were compared, so that a restart does not compare them again.

A comparison compiles two programs and decodes random rows with both (see `slice_rows`). Otherwise
the first sample after each start would wait for it.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from skyrl_tx.backends.jax.compiler import replace_json

log = logging.getLogger(__name__)

_PRODUCT = Path(__file__).parents[3]
_SOURCES = "backends/jax", "layers", "models"
"""The folders with the code of programs."""
_CPUINFO = Path("/proc/cpuinfo")


class ComparedRows:
    """A file that says, for each comparison, whether both row counts gave the same bits.

    The file belongs to one setup: the model, the settings, the code, the versions of JAX and the CPU.
    """

    def __init__(self, directory: Path, *setup: object) -> None:
        """`setup` is everything that changes a program on this machine, with a stable `repr`."""
        texts = (repr(setup), *_describe_machine(), _hash_sources())
        name = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
        self._path = directory / "compared_rows" / f"{name}.json"

    def read(self) -> dict[str, bool]:
        """Return all comparisons by name; none if there is no valid file."""
        try:
            content = json.loads(self._path.read_text())
            return {str(name): agrees for name, agrees in content.items() if isinstance(agrees, bool)}
        except (OSError, ValueError, AttributeError):
            return {}

    def write(self, comparisons: Mapping[str, bool]) -> None:
        """Replace the file."""
        try:
            replace_json(self._path, comparisons)
        except OSError as error:
            log.warning("cannot write which row counts were compared, so the next start compares them: %s", error)


def _describe_machine() -> list[str]:
    """Return what XLA compiles CPU programs for: versions, flags, instructions and cores."""
    cpu = ""
    with suppress(OSError):
        cpu = _CPUINFO.read_text().split("\n\n")[0]
    lines = [line for line in cpu.splitlines() if line.startswith(("model name", "flags", "Features"))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = (f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    return [*versions, platform.machine(), *lines, f"{cores} cores", os.environ.get("XLA_FLAGS", "")]


def _hash_sources() -> str:
    """Return a hash of the code of all programs."""
    content = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_PRODUCT / folder).rglob("*.py")):
            content.update(path.relative_to(_PRODUCT).as_posix().encode() + path.read_bytes())
    return content.hexdigest()
